"""`python -m tests.docs.api_reference`: reference pages of the node-local APIs, by their protos.

protoc reads the definitions with their comments, which are the reference; each message, field,
method and value must have one.
"""

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = pathlib.Path(__file__).parents[2]
PROTOS = tuple(sorted(ROOT.glob("agent/**/client/*/*.proto")))

_Path = tuple[int, ...]
# The path of the `syntax` statement, whose comment describes the file.
_SYNTAX = (FileDescriptorProto.SYNTAX_FIELD_NUMBER,)


class UndocumentedError(Exception):
    """A part of a definition has no comment."""


def pages() -> dict[str, str]:
    """Path and content of each page. Raises `UndocumentedError`."""
    return {
        f"docs/reference/{file.package.replace('.', '-')}.md": page(file)
        for file in descriptors(PROTOS, ROOT)
    }


def descriptors(protos: Iterable[pathlib.Path], root: pathlib.Path) -> list[FileDescriptorProto]:
    """The definitions with their comments, in the order of `protos`."""
    with tempfile.TemporaryDirectory() as directory:
        target = pathlib.Path(directory) / "set"
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", "--include_source_info"),
                *(f"--descriptor_set_out={target}", *map(str, protos)),
            ],
            check=True,
            timeout=60,
        )
        return list(FileDescriptorSet.FromString(target.read_bytes()).file)


def page(file: FileDescriptorProto) -> str:
    """The page of one definition. Raises `UndocumentedError`."""
    return "\n".join(_Page(file).lines()) + "\n"


class _Page:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: Mapping[_Path, str] = {
            tuple(one.path): one.leading_comments for one in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        file = self._file
        yield f"# {file.package}"
        yield ""
        yield self._comment(_SYNTAX, file.name, "\n\n")
        yield ""
        yield f"Definition: [{file.name}](../../{file.name}). "
        yield f"Go package: `{file.options.go_package.partition(';')[0]}`."
        for i, service in enumerate(file.service):
            path = (FileDescriptorProto.SERVICE_FIELD_NUMBER, i)
            rows = (
                (f"{one.name}({_link(one.input_type)})", _returns(one), one.name, (*path, 2, j))
                for j, one in enumerate(service.method)
            )
            yield from self._section(service.name, path, "method | response", rows)
        for i, message in enumerate(file.message_type):
            path = (FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, i)
            rows = (
                (f"`{one.name}` = {one.number}", _type(message, one), one.name, (*path, 2, j))
                for j, one in enumerate(message.field)
            )
            yield from self._section(message.name, path, "field | type", rows)
        for i, enum in enumerate(file.enum_type):
            path = (FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, i)
            values = (
                (f"`{one.name}`", str(one.number), one.name, (*path, 2, j))
                for j, one in enumerate(enum.value)
            )
            yield from self._section(enum.name, path, "value | number", values)

    def _section(
        self, name: str, path: _Path, head: str, rows: Iterable[tuple[str, str, str, _Path]]
    ) -> Iterator[str]:
        yield from ("", f"## {name}", "", self._comment(path, name, "\n\n"))
        for i, (first, second, part, at) in enumerate(rows):
            if i == 0:
                yield from ("", f"| {head} | |", "|---|---|---|")
            comment = self._comment(at, f"{name}.{part}", " ")
            yield f"| {first} | {second} | {comment} |"

    def _comment(self, path: _Path, name: str, between: str) -> str:
        """One line for each paragraph."""
        paragraphs = self._comments.get(path, "").strip().split("\n\n")
        joined = between.join(" ".join(one.split()) for one in paragraphs)
        if not joined:
            raise UndocumentedError(f"{self._file.name}: {name} has no comment")
        return joined.replace("|", "\\|")


def _returns(method: MethodDescriptorProto) -> str:
    return f"{'stream of ' if method.server_streaming else ''}{_link(method.output_type)}"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    text = _link(field.type_name) if field.type_name else name
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            key, value = (_type(entry, one) for one in entry.field)
            return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {text}"
    if field.HasField("oneof_index"):
        return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _link(name: str) -> str:
    """A type of this definition, or of protobuf's own."""
    short = name.rpartition(".")[2]
    return f"`{name[1:]}`" if name.startswith(".google.") else f"[{short}](#{short.lower()})"


def main() -> None:
    for name, content in pages().items():
        (ROOT / name).write_text(content, encoding="utf-8")
        sys.stderr.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()

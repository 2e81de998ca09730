"""`python -m tests.attacks`: writes the list of tests in docs/internals/attacks.md.

`make docs` runs it. The page names the files with attacks; for each of them the list has a row with
each test, which is its name. A test holds that the page is current.
"""

import ast
import dataclasses
import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "internals" / "attacks.md"
DIRECTORY = _ROOT / "tests" / "kernel"
_DEVICES = DIRECTORY / "devices"
_FILES = re.compile(r"`(test_\w+\.py)`")
_BEGIN = "<!-- `make docs` writes this table from the tests' names; manual changes are lost. -->\n"
_END = "<!-- end of the table -->\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The tests of one file. summary: the docstring's first sentence."""

    file: str
    summary: str
    tests: tuple[str, ...]


def groups(page: str) -> list[Group]:
    """The files that the page names before its list, in that order."""
    before = page.partition(_BEGIN)[0]
    return [_group(_path(name)) for name in dict.fromkeys(_FILES.findall(before))]


def render(page: str) -> str:
    """The page with its table as of now. Raises `ValueError` without the table's two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no table between {_BEGIN.strip()!r} and {_END.strip()!r}")
    return f"{before}{_BEGIN}{_table(page)}{_END}{after}"


def _path(name: str) -> pathlib.Path:
    path = DIRECTORY / name
    return path if path.exists() else _DEVICES / name


def _group(path: pathlib.Path) -> Group:
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    text = " ".join((ast.get_docstring(module) or "").split())
    return Group(path.name, re.split(r"(?<=[.:]) ", text)[0].rstrip(".:"), tuple(names))


def _table(page: str) -> str:
    rows = ["| tests | what they show |", "|---|---|"]
    for group in groups(page):
        where = _path(group.file).relative_to(_ROOT)
        title = f"{group.summary} ([{group.file}](../../{where}))"
        rows += [f"| {title} | {_sentence(group.tests[0])}. |"]
        rows += [f"| | {_sentence(name)}. |" for name in group.tests[1:]]
    return "".join(f"{row}\n" for row in rows)


def _sentence(name: str) -> str:
    words = re.sub(r"_s(?=_|$)", "'s", name.removeprefix("test_")).replace("_", " ")
    return words[0].upper() + words[1:]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)

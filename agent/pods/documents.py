"""Files of YAML or JSON that operators write, read safely."""

import os
import pathlib

import msgspec
import yaml

from agent import tasks
from agent.errors import PodgateError

SUFFIXES = (".yaml", ".yml", ".json")
# etcd takes no object over 1.5 MiB, and what people write has some KiB.
MAX_BYTES = 1 << 20
# For services and slices of a cluster: 1,000 services have one to three MiB. YAML of this size
# stops other threads for 0.2 s at a time, so larger sets are several files.
MAX_LARGE_BYTES = 8 << 20
# The deepest field of a v1.Pod is some 15 levels down.
_MAX_DEPTH = 100
# A pod with a hundred containers has some thousands. libyaml composes a document without letting
# other threads run, 1 ms for a thousand values, so this bounds the delay of probes.
_MAX_VALUES = 20_000

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# inode, size and change time in ns: when they are the same, so is the content
Stamp = tuple[int, int, int]
NEVER_READ: Stamp = (0, 0, 0)


class DocumentError(PodgateError):
    """This file cannot be read as documents; the message is one sentence that names it."""


class BusyError(DocumentError):
    """No file descriptor is free, so the file is to be read again."""


def stamps(directory: pathlib.Path, only: str | None = None) -> dict[str, Stamp]:
    """The files of a directory by name; only: no more than this one, if it exists.

    Hidden files and those that are neither YAML nor JSON are left out. Raises `OSError`.
    """
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            is_ours = not entry.name.startswith(".") and entry.name.endswith(SUFFIXES)
            if not (is_ours if only is None else entry.name == only):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            found[entry.name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def read_one(path: pathlib.Path) -> object:
    """The one document of a file as plain objects. Raises `DocumentError`."""
    documents = read_all(path)
    if len(documents) > 1:
        raise DocumentError(f"{path.name} holds {len(documents)} documents; give each its own file")
    return documents[0] if documents else None


def read_all(path: pathlib.Path, *, is_large: bool = False) -> list[object]:
    """All documents of a file as plain objects, but for empty ones; JSON has one.

    is_large: up to 8 MiB with any number of values, instead of 1 MiB. Raises `DocumentError`, and
    `BusyError` of these.
    """
    limit = MAX_LARGE_BYTES if is_large else MAX_BYTES
    try:
        if path.stat().st_size > limit:
            raise DocumentError(f"{path.name} is larger than {limit >> 20} MiB")
        content = path.read_bytes()
        if path.suffix == ".json":
            return [msgspec.json.decode(content)]
        _check_size(content, path.name, limit if is_large else _MAX_VALUES)
        return [one for one in yaml.load_all(content, Loader=_Loader) if one is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "it cannot be read as text"
        raise DocumentError(f"{path.name} is not YAML{where}: {what}") from error
    except msgspec.DecodeError as error:
        raise DocumentError(f"{path.name} is not JSON: {error}") from error
    except RecursionError as error:
        raise DocumentError(f"{path.name} is nested too deeply") from error
    except ValueError as error:
        # A number or a date that YAML's rules take for one and Python does not.
        raise DocumentError(f"{path.name} has a value that cannot be: {error}") from error
    except OSError as error:
        kind = BusyError if tasks.is_shortage(error) else DocumentError
        raise kind(f"{path.name} cannot be read: {error.strerror}") from error


def _check_size(content: bytes, name: str, max_values: int) -> None:
    """Reject deep nesting, very many values, and aliases, before any recursive function runs.

    Nested aliases can expand to any number of values (the "billion laughs"), and manifests need
    none. Raises `DocumentError` and `YAMLError`.
    """
    depth = values = 0
    for event in yaml.parse(content, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise DocumentError(f"{name} has a YAML anchor or alias; write its content in full")
        if isinstance(event, yaml.DocumentStartEvent):
            depth = values = 0
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
        if depth > _MAX_DEPTH:
            raise DocumentError(f"{name} is nested more than {_MAX_DEPTH} deep")
        if values > max_values:
            raise DocumentError(
                f"{name} has a document of more than {max_values:,} values; split it"
            )

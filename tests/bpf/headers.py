"""A small reader of src/abi.h: enums and plain numeric macros."""

import re

from bpf import sources

_ENUM = r"enum {name} \{{(?P<body>.*?)\}};"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def _text() -> str:
    text = (sources.SOURCE_DIRECTORY / "abi.h").read_text(encoding="ascii")
    return _COMMENT.sub("", text)


def enum(name: str) -> dict[str, int]:
    """Enumerators and their numbers, in the order in which they are written."""
    match = re.search(_ENUM.format(name=name), _text(), re.DOTALL)
    assert match, f"there is no enum {name}"
    words = [word.strip() for word in match["body"].split(",")]
    # A number that is written out would need a reader of its own: there is none so far.
    assert not any("=" in word for word in words)
    return {word: number for number, word in enumerate(filter(None, words))}


def constant(name: str) -> int:
    match = re.search(rf"#define {name}\s+\(?(\d+)(?: << (\d+))?\)?[ \t]*$", _text(), re.MULTILINE)
    assert match, f"there is no number {name}"
    return int(match[1]) << int(match[2] or 0)

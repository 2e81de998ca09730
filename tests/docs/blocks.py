"""Fenced blocks of commands in README and docs, and where each is run.

The words behind a block's language decide:

    ```sh sandbox               tests/kernel/test_walk.py runs it, in namespaces of its own
    ```sh cluster               tests/cluster/test_walk.py runs it against a cluster of one node
    ```sh cluster by helm       the same, where podgate is installed by Helm; else "by kubectl"
    ```sh test: tests/x.py      that test runs the same
    ```sh untested: a reason    no test can run it

`console` has commands behind `$ ` and the output of each; "..." matches anything, as in doctest.
Without these words only a block's syntax and options are checked (`tests/docs/commands.py`).
"""

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
WALKS = (ROOT / "README.md", *sorted(ROOT.glob("docs/guides/*.md")))
"""Pages of which every command runs in a test, or has the reason why none can run it."""
_DIRECTORIES = (".", "docs", "docs/internals", "docs/runbooks")
PAGES = tuple(
    sorted({*WALKS, *(page for name in _DIRECTORIES for page in ROOT.glob(f"{name}/*.md"))})
)
"""All pages but those of docs/reference, which are generated."""
LANGUAGES = ("sh", "console")

_FENCE = re.compile(
    r"^(?P<fence> *```+)(?P<info>.*)\n(?P<text>(?:.*\n)*?)(?P=fence)$", re.MULTILINE
)
_CONTINUED = re.compile(r"(?:\\|\||&&)\s*$")


class BlockError(Exception):
    """A block that cannot be read; the message names page and line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command of a block, which may have several lines, and the output that the page shows."""

    text: str
    output: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `marker` is what follows the language; `line` that of its fence."""

    page: pathlib.Path
    line: int
    language: str
    marker: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_commands(self) -> bool:
        return self.language in LANGUAGES

    def commands(self) -> list[Command]:
        """Of `sh`: all of it is one command, so a here-document or a loop is whole."""
        if self.language == "sh":
            return [Command(self.text)]
        return list(self._sessions())

    def _sessions(self) -> Iterator[Command]:
        command: list[str] = []
        output: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                if command:
                    yield _command(command, output)
                command, output = [line[2:]], []
            elif not command:
                raise BlockError(f"{self.place}: a console block starts with a command ('$ ')")
            elif not output and _CONTINUED.search(command[-1]):
                command.append(line)
            else:
                output.append(line)
        if command:
            yield _command(command, output)


def read(page: pathlib.Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, marker = match["info"].strip().partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        text_of_block = textwrap.dedent(match["text"])
        found.append(Block(page, line, language, marker.strip(), text_of_block))
    return found


def files(page: pathlib.Path) -> dict[str, str]:
    """A page's YAML that begins with a comment, which is the name of its file."""
    yaml = [block.text for block in read(page) if block.language == "yaml"]
    return {text.split()[1]: text for text in yaml if text.startswith("# ")}


def of(page: pathlib.Path, *markers: str) -> list[Block]:
    """A page's blocks of commands that have one of these markers, in their order."""
    return [block for block in read(page) if block.is_commands and block.marker in markers]


def matches(expected: str, output: str) -> bool:
    """Whether output is as the page shows it; the width of white space does not count."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("...")]
    return re.fullmatch(r"\s*.*\s*".join(parts), " ".join(output.split()), re.DOTALL) is not None


def _command(lines: list[str], output: list[str]) -> Command:
    return Command("\n".join(lines), "\n".join(output) if any(output) else None)

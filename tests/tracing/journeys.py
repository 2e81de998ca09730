"""The journeys of docs/architecture.md, and what a trace shows of one of their lists."""

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Collection, Iterable, Sequence

from tests.tracing.trace import Entry

_ROOT = pathlib.Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "architecture.md"

# Where processes and tasks begin, for whatever they do.
_ENTRANCES = {
    *("agent/__main__.py", "agent/operate/cli/main.py", "agent/relay/__main__.py"),
    "agent/tasks.py",
}

_FILE = re.compile(r"`((?:agent|bpf|probes)/[\w./-]+\.(?:py|c|h))`")
_STEP = re.compile(r"^\d+\. `([\w./]+)`((?:.|\n(?! *\d+\.|\n))*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One item of a list. text: what follows the path."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def files(self) -> list[str]:
        """Its own, and those that the text names."""
        return [self.path, *_FILE.findall(self.text)]

    @property
    def words(self) -> list[str]:
        """What the text has in code style."""
        return re.findall(r"`(\w+)`", self.text)

    @property
    def names(self) -> list[str]:
        """The functions that the text names, and classes with methods."""
        defined = _defined(self.path) if self.is_python else set()
        return [word for word in self.words if word in defined]


@dataclasses.dataclass(frozen=True)
class Journey:
    """lists: of steps, each in the order of the page; named: all files in its text."""

    lists: Sequence[Sequence[Step]]
    named: Collection[str]

    @property
    def steps(self) -> list[Step]:
        return [step for steps in self.lists for step in steps]


@functools.cache
def journeys() -> dict[str, Journey]:
    """By title."""
    part = PAGE.read_text("utf-8").split("## Journeys\n")[1].split("\n## ")[0]
    return {section.splitlines()[0]: _journey(section) for section in part.split("### ")[1:]}


def _journey(section: str) -> Journey:
    blocks = [block for block in section.split("\n\n") if block.startswith("1. ")]
    lists = [[Step(path, text) for path, text in _STEP.findall(block)] for block in blocks]
    return Journey(lists, frozenset(_FILE.findall(section)))


@functools.cache
def _defined(path: str) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(ast.parse((_ROOT / path).read_text("utf-8"))))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {node.name for node in nodes if isinstance(node, functions)} | {
        node.name for node in classes if any(isinstance(item, functions) for item in node.body)
    }


def problems(journey: Journey, steps: Iterable[Step], entries: Sequence[Entry]) -> list[str]:
    """What the trace shows against these steps: one sentence for each.

    A step is passed when its file, or each function that it names, handles the thing after the step
    before was passed. What called it is on the page, too; others, such as what makes findings, may
    call it besides.
    """
    found = []
    passed_at = 0
    for step in steps:
        first = [_first(journey, step, name, entries, passed_at) for name in step.names or [""]]
        for name, entry in zip(step.names or [""], first, strict=True):
            if entry is None:
                what = f"`{name}` of {step.path}" if name else step.path
                since = " after the step before it" if passed_at else ""
                found.append(f"{what} is not passed{since}.")
        passed = [entry for entry in first if entry]
        if not passed:
            continue
        entry = min(passed, key=lambda one: one.at)
        passed_at = entry.at
        found += [
            f"{step.path} is called through {path}, which the journey does not name."
            for path in _unnamed(journey, step, entry)
        ]
    return found


def _first(
    journey: Journey, step: Step, name: str, entries: Iterable[Entry], since: int
) -> Entry | None:
    """Of the entries by callers that the journey names; of all, if there is none."""
    passed = [
        entry
        for entry in entries
        if entry.at >= since
        and any(
            path == step.path and (not name or name in function.split("."))
            for path, function in entry.stack
        )
    ]
    own = (entry for entry in passed if not _unnamed(journey, step, entry))
    return next(own, passed[0] if passed else None)


def _unnamed(journey: Journey, step: Step, entry: Entry) -> list[str]:
    """Files that have called the step, and are not on the page."""
    callers = dict.fromkeys(path for path, _ in entry.stack[_index(step, entry) :])
    return [path for path in callers if path not in journey.named and path not in _ENTRANCES]


def _index(step: Step, entry: Entry) -> int:
    """Of the step's innermost frame."""
    return [path for path, _ in entry.stack].index(step.path)

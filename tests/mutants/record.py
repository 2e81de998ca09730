"""Which unit tests run which lines, from one run without a mutant."""

from collections.abc import Iterable
from dataclasses import dataclass, field

# Coverage's context of what no test runs.
_AT_IMPORT = ""


@dataclass(slots=True)
class Record:
    """What unit tests run, from one run without a mutant."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """By module and line: the tests that run it, as pytest names functions."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By test, and by file."""
    failed: list[str] = field(default_factory=list)
    """Tests that fail without a mutant, which cannot detect one."""

    @classmethod
    def merged(cls, parts: Iterable["Record"]) -> "Record":
        """Of runs of different tests."""
        whole = cls()
        for part in parts:
            whole.seconds |= part.seconds
            whole.failed += part.failed
            for path, by_line in part.lines.items():
                into = whole.lines.setdefault(path, {})
                for line, tests in by_line.items():
                    into[line] = into.get(line, set()) | tests
        return whole

    def files(self) -> list[str]:
        """Those with tests that ran."""
        return sorted({test.partition("::")[0] for test in self.seconds})

    def duration(self, tests: Iterable[str]) -> float:
        """How many seconds tests take, or all of a file."""
        return sum(self.seconds.get(test, 0) for test in tests)

    def runs(self, path: str) -> set[str]:
        """The tests that run a function of a module."""
        return set().union(*self.lines.get(path, {}).values()) - {_AT_IMPORT}

    def tests_of(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that run one of these lines of a module, or their files; what no test function
        runs, but an import or a fixture of a file does, concerns all that run the module."""
        by_line = self.lines.get(path, {})
        found = set().union(*(by_line.get(line, set()) for line in lines))
        if found and not any("::" in name for name in found):
            found |= self.runs(path)
        return found - {_AT_IMPORT}

"""Which kernel tests enter which functions: recorded once, and kept in the virtual environment.

A record of all takes as long as all kernel tests. A test file that is new or changed is recorded by
the next run. What other files enter may have changed since: then some mutant survives that a test
detects, and none is killed that no test detects. `make clean` removes the record.
"""

import gzip
import hashlib
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# For one mutant: a dozen tests, each of which starts an agent. `_START_SECONDS` of trials is more.
_SECONDS = 30.0
_PLACE = pathlib.Path(".venv", "mutants-kernel.json.gz")
_WORD = re.compile(r"[a-z]+")
# A word of tests' and packages' names that connects none of them.
_COMMON = frozenset({"agent", "test", "tests", "py", "kernel", "node", "pod", "pods", "cli", "to"})


@dataclass(slots=True)
class Entries:
    """What kernel tests enter."""

    functions: dict[str, list[str]] = field(default_factory=dict)
    """By test, as pytest names functions: each function, as in "agent/gates/ports.py:Ports.add"."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By test, and by file."""
    failed: list[str] = field(default_factory=list)
    """Tests that fail without a mutant, which cannot detect one."""
    files: dict[str, str] = field(default_factory=dict)
    """The test files that ran, with the hash of their content."""

    @classmethod
    def read(cls, root: pathlib.Path) -> "Entries":
        """The record of this tree; an empty one if there is none."""
        place = root / _PLACE
        return cls(**json.loads(gzip.decompress(place.read_bytes()))) if place.exists() else cls()

    def write(self, root: pathlib.Path) -> None:
        (root / _PLACE).write_bytes(gzip.compress(json.dumps(asdict(self)).encode()))

    def keep_only(self, root: pathlib.Path, tests: Collection[str]) -> list[str]:
        """Forget other files, and those that have changed since; returns what is not recorded."""
        found = {test: _hash(root / test) for test in tests}
        kept = {test for test, content in found.items() if self.files.get(test) == content}
        self.files = {test: found[test] for test in sorted(kept)}
        self.functions = {test: of for test, of in self.functions.items() if _file(test) in kept}
        self.seconds = {test: of for test, of in self.seconds.items() if _file(test) in kept}
        self.failed = [test for test in self.failed if _file(test) in kept]
        return sorted({*tests} - kept)

    def add(
        self,
        lines: Iterable[str],
        report: Mapping[str, Any],
        root: pathlib.Path,
        tests: Collection[str],
    ) -> None:
        """Of one more run. lines: of tests/mutants/hook; report: of tests.mutants.recording; tests:
        the files that ran."""
        found: dict[str, set[str]] = {}
        for line in lines:
            test, _, function = line.rstrip("\n").partition("\t")
            found.setdefault(test, set()).add(function)
        self.functions |= {test: sorted(names) for test, names in found.items() if test}
        self.seconds |= report["seconds"]
        self.failed = sorted({*self.failed, *report["failed"]})
        self.files |= {test: _hash(root / test) for test in tests}

    def tests_of(self, path: str, function: str) -> list[str]:
        """The tests to try a mutant of this function with, in half a minute: those whose file is
        named as the module first, one of each file before a second one, the quickest first."""
        entered = f"{path}:{function}"
        wanted = _words(path)
        entering = [
            test
            for test, functions in self.functions.items()
            if entered in functions and "::" in test and test not in self.failed
        ]
        entering.sort(key=lambda test: (-len(wanted & _words(_file(test))), self.duration([test])))
        first = list({_file(test): test for test in reversed(entering)}.values())[::-1]
        chosen: list[str] = []
        for test in [*first, *(test for test in entering if test not in first)]:
            if self.duration([*chosen, test]) <= _SECONDS or not chosen:
                chosen.append(test)
        return chosen

    def duration(self, tests: Iterable[str]) -> float:
        return sum(self.seconds.get(test, 0) for test in tests)


def _hash(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file(test: str) -> str:
    return test.partition("::")[0]


def _words(path: str) -> set[str]:
    """Singular and plural are the same word."""
    return {word.rstrip("s") for word in _WORD.findall(path)} - _COMMON

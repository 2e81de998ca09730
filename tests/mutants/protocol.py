"""What goes between `make mutants` and its trial servers."""

from dataclasses import dataclass

DESCRIPTOR = "PODGATE_MUTANTS_DESCRIPTOR"
"""The variable with the server's end of the connection."""

STRETCH = 10
"""Real time, of what the tests of a request may take: the most that other load may stretch it."""


@dataclass(frozen=True, slots=True)
class Request:
    """A mutant to try; without a difference, the tests alone."""

    path: str
    """Of the module, which has the changed source in the copy."""
    source: str
    changed: str
    tests: tuple[str, ...]
    """In their order: files, functions, or as in `Answer`."""
    seconds: dict[str, float]
    """By function or file: how long it may take, without waits for a processor."""
    all_seconds: float
    """The same, of all tests."""
    without: frozenset[str] = frozenset()
    """Tests of these that are left out: functions, or as in `Answer`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a mutant, which survived if nothing is set."""

    failed: tuple[str, ...] = ()
    """The test that failed or did not end, with its parameters; all of them if pytest failed after
    the last."""
    problem: str = ""
    """Why the mutant cannot be tried by a fork."""

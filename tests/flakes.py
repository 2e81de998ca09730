"""`python -m tests.flakes [TEST...]`: how often tests fail beside a load on all processors.

Without tests: those that the last runs of `make test` recorded as flaky. Each runs in a process of
its own, one after another. Printed are the rate, each kind of failure with its count, and the
output of the first run that failed and of the first that passed. The exit status is 1 if one
failed, 2 if a test does not exist.
"""

import argparse
import collections
import json
import pathlib
import sys
import time

import pytest

from tests import alone, load, twice

_RECORD = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "v" / twice.RECORD
_NO_RESULT = (
    pytest.ExitCode.INTERRUPTED,  # an error of collection
    pytest.ExitCode.USAGE_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flakes", description=__doc__)
    parser.add_argument("tests", nargs="*", help="node ids; default: the recorded flaky tests")
    parser.add_argument("--times", type=int, default=50, help="runs of each test")
    parser.add_argument("--minutes", type=float, default=20, help="limit of each test's runs")
    options = parser.parse_args(arguments)
    tests = options.tests or recorded(_RECORD)
    if not tests:
        _write("no flaky test is recorded; name some: make flakes TESTS=tests/FILE.py::TEST\n")
    with load.busy_processors():
        return max(
            (_measure(test, options.times, options.minutes * 60) for test in tests), default=0
        )


def recorded(record: pathlib.Path) -> list[str]:
    """Tests that were flaky in the last run that had them."""
    try:
        return list(json.loads(record.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []


def _measure(test: str, times: int, limit_seconds: float) -> int:
    """Run a test, and print its results, also when interrupted; an exit status."""
    deadline = time.monotonic() + limit_seconds
    attempts: list[alone.Attempt] = []
    _write(f"{test} ")
    try:
        while len(attempts) < times and (seconds := deadline - time.monotonic()) > 0:
            attempt = alone.run(test, limit_seconds=seconds)
            if attempt.status in _NO_RESULT:
                _write(f"\n{attempt.output}")
                return 2
            if attempt.status is None and attempts:
                break  # by the limit of all runs, so it shows nothing
            attempts.append(attempt)
            _write("F" if attempt.problem else ".")
    finally:
        _write_results(test, attempts)
    return 1 if any(attempt.problem for attempt in attempts) else 0


def _write_results(test: str, attempts: list[alone.Attempt]) -> None:
    if not attempts:
        return
    failed = [attempt for attempt in attempts if attempt.problem]
    passed = [attempt for attempt in attempts if not attempt.problem]
    slowest = max(attempt.seconds for attempt in attempts)
    rate = len(failed) / len(attempts)
    _write(f"\n  failed {len(failed)} of {len(attempts)} ({rate:.0%}); slowest {slowest:.1f} s\n")
    kinds = collections.Counter(attempt.problem for attempt in failed)
    for problem, count in kinds.most_common():
        _write(f"  {count} of {len(failed)}: {problem}\n")
    if failed:
        for name, same in (("failed", failed), ("passed", passed)):
            for attempt in same[:1]:
                _write(f"--- the first run that {name}\n{attempt.output}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One trial in a fork of a trial server: runs tests until one fails."""

import asyncio
import mmap
import os
import random
import resource
import struct
import traceback
from collections.abc import Sequence
from typing import NoReturn

import pytest

from tests.mutants import namespaces
from tests.mutants.live_code import Replacement

STARTING, RUNNING, ENDING, PASSED, FAILED = range(5)
"""States of a trial. It failed also if it ends as `RUNNING` or `ENDING`; as `STARTING` it had no
effect of the mutant yet."""

_FIRST = 1  # of a PID namespace


class Progress:
    """How far a trial is: shared by the server and its fork, without a descriptor. What the fork
    forks writes nothing."""

    _CONTENT = struct.Struct("=BI")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._CONTENT.size)

    def write(self, state: int, number: int = 0) -> None:
        """number: of the test."""
        if os.getpid() == _FIRST:
            self._memory[:] = self._CONTENT.pack(state, number)

    def read(self) -> tuple[int, int]:
        """State and test."""
        state, number = self._CONTENT.unpack(self._memory[:])
        return state, number


class _Failures:
    """A plugin: whether a test has failed."""

    def __init__(self) -> None:
        self.has_any = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_any |= report.failed


def run(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    replacements: Sequence[Replacement],
    seconds: float,
    progress: Progress,
) -> NoReturn:
    """Runs in a process that `namespaces.fork` made, and ends it."""
    try:
        namespaces.enter(os.environ["TMPDIR"])
        _set_up(session.config, seconds)
        failures = _Failures()
        session.config.pluginmanager.register(failures)
        progress.write(RUNNING)
        for function, code in replacements:
            function.__code__ = code
        _run(session, items, failures, progress)
        progress.write(PASSED)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _set_up(config: pytest.Config, seconds: float) -> None:
    """As in a new process."""
    limit = round(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(silence, number)
    os.close(silence)
    # Its files would have what a killed trial printed.
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    # As tests/conftest.py did: since Python 3.12 a fork forgets it (CPython gh-66285).
    asyncio.set_event_loop(None)
    random.seed()


def _run(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    failures: _Failures,
    progress: Progress,
) -> None:
    for number, item in enumerate(items):
        progress.write(RUNNING, number)
        following = items[number + 1] if number + 1 < len(items) else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failures.has_any:
            progress.write(FAILED, number)
            os._exit(0)
    # Raises errors of objects that are removed last, as pytest does at its end.
    progress.write(ENDING)
    session.config._ensure_unconfigure()

"""A plugin of pytest: instead of running tests, tries mutants with them, each in a fork.

The process collects test files, so it has imported all that they need; to start pytest for each
mutant takes longer than most tests. A fork has only the thread that forks, so the server has one,
which it checks. It runs no code that a mutant changed, and its forks are in PID namespaces of
their own, so no mutant ends it.
"""

import contextlib
import gc
import os
import pathlib
import select
import signal
import time
from collections import defaultdict
from multiprocessing.connection import Connection

import pytest

from tests.mutants import live_code, namespaces, trial_child
from tests.mutants.protocol import DESCRIPTOR, STRETCH, Answer, Request

_ROOT = pathlib.Path(__file__).parents[2]
# How often the waits of a trial are read: its last ones are counted late by that.
_POLL_SECONDS = 1.0

_connection = pytest.StashKey["Connection[Answer, Request]"]()
_live = pytest.StashKey[live_code.LiveCode]()


class _Server:
    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._connection = session.config.stash[_connection]
        self._live = session.config.stash[_live]
        self._items: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            for name in dict.fromkeys(_names(item)):
                self._items[name].append(item)

    def serve(self) -> None:
        """Until the other end is closed. The first answer is whether it can."""
        threads = len(os.listdir("/proc/self/task"))
        problem = f"importing the unit tests started {threads - 1} threads" if threads > 1 else ""
        self._connection.send(Answer(problem=problem))
        with contextlib.suppress(EOFError):
            while True:
                self._connection.send(self._answer(self._connection.recv()))

    def _answer(self, request: Request) -> Answer:
        try:
            replacements = self._live.replacements(request.path, request.source, request.changed)
        except live_code.CannotReplaceError as error:
            return Answer(problem=str(error))
        if not self._items.keys() >= {*request.tests}:
            return Answer(problem="some of its tests were not collected")
        items = self._ordered(request)
        limits = [max(request.seconds.get(name, 0.0) for name in _names(item)) for item in items]
        state, number = self._run(items, replacements, limits, request.all_seconds)
        if state == trial_child.STARTING:
            return Answer(problem="the fork of the server did not start")
        if state == trial_child.PASSED:
            return Answer()
        failed = items if state == trial_child.ENDING else [items[number]]
        return Answer(failed=tuple(item.nodeid for item in failed))

    def _ordered(self, request: Request) -> list[pytest.Item]:
        """Those of a file together, since they share fixtures."""
        found = dict.fromkeys(item for name in request.tests for item in self._items[name])
        files: dict[pathlib.Path, int] = {}
        for item in found:
            files.setdefault(item.path, len(files))
        items = [item for item in found if not request.without & {*_names(item)}]
        return sorted(items, key=lambda item: files[item.path])

    def _run(
        self,
        items: list[pytest.Item],
        replacements: list[live_code.Replacement],
        limits: list[float],
        seconds: float,
    ) -> tuple[int, int]:
        """State and test at the end."""
        progress = trial_child.Progress()
        pid = namespaces.fork()
        if pid == 0:
            self._connection.close()
            trial_child.run(self._session, items, replacements, seconds, progress)
        _Watch(progress, limits, seconds).wait(pid)
        return progress.read()


def _names(item: pytest.Item) -> tuple[str, str, str]:
    """Of itself, its function and its file."""
    function = item.nodeid.partition("[")[0]
    return item.nodeid, function, function.partition("::")[0]


class _Watch:
    """Ends a trial in which a test, or all of them, take longer than they may."""

    def __init__(
        self, progress: trial_child.Progress, limits: list[float], all_seconds: float
    ) -> None:
        """limits: of each test, in seconds, as in `Request`."""
        self._progress = progress
        self._limits = limits
        self._all_seconds = all_seconds
        self._started = time.monotonic()
        self._waits: dict[str, float] = {}
        self._test, self._test_started = 0, 0.0

    def wait(self, pid: int) -> None:
        """Until the process has ended."""
        with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            while not poll.poll(1000 * _POLL_SECONDS):
                if self._is_late():
                    signal.pidfd_send_signal(ended.fileno(), signal.SIGKILL)
                    break
        os.waitpid(pid, 0)

    def _is_late(self) -> bool:
        self._waits |= _waits()
        real = time.monotonic() - self._started
        passed = real - sum(self._waits.values())
        _, test = self._progress.read()
        if test != self._test:
            self._test, self._test_started = test, passed
        limit = self._limits[test] if self._limits else 0.0
        return (
            passed - self._test_started > limit
            or passed > self._all_seconds
            or real > STRETCH * self._all_seconds
        )


def _waits() -> dict[str, float]:
    """By process below this one: for how many seconds its main thread was ready to run and had no
    processor. Source: Documentation/scheduler/sched-stats.rst."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                waited_ns = pathlib.Path("/proc", name, "schedstat").read_text().split()[1]
                found[name] = int(waited_ns) / 1e9
    return found


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any module of podgate is imported."""
    descriptor = int(os.environ.pop(DESCRIPTOR))
    os.set_inheritable(descriptor, False)
    early_config.stash[_connection] = Connection(descriptor)
    early_config.stash[_live] = live_code.LiveCode(str(_ROOT))
    early_config.stash[_live].watch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    # tests/conftest.py did this at the end of collection.
    gc.unfreeze()
    session.config.stash[_live].index()
    gc.freeze()
    _Server(session).serve()
    os._exit(0)

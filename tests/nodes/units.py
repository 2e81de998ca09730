"""Plugin of pytest: kernel tests run in processes of their own, each on a node of its own.

A test that changes its node (fixture `own_node`) has one for itself; the others of a file share
one, and those with the mark `shared_node` one for the whole run. The worker's process forks a child
that enters the node, runs its tests, and sends back their reports. So whatever a test leaves ends
with its node, and reaches no other.

A child that is as it was before the tests (one thread, the same user, capabilities, signals and
limits) continues with the next unit, on a new node: a fork and its page faults take twice as long
as an empty test.

The worker's process runs no test, so that it forks as it started: with one thread, and without what
does not outlive a fork (gRPC). In a run with kernel tests, those of a file that are none are forked
off together, too, on no node. What is made once a worker (loaded programs, the server that forks
agents), it makes before it forks.
"""

import asyncio
import collections
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pathlib
import signal
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Literal, NoReturn

import pytest
from _pytest import runner

from tests import reports
from tests.nodes import balance, leftovers, node, worker

OWN_NODE = "own_node"
"""The fixture of tests that need a node for themselves."""
FILE_NODE = "file_node"
"""The mark of tests that share a node, though they change it, for what is expensive to make."""
SHARED_NODE = "shared_node"
"""The mark of tests that have one node for the whole run."""

_NO_NODE = " on no node"
"""What the keys of units end with whose tests are no kernel tests."""

# Of /proc/self/status: see proc_pid_status(5).
_KEPT = (
    *("Umask", "Uid", "Gid", "Groups", "Threads", "NoNewPrivs", "Seccomp", "Cpus_allowed_list"),
    *("SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)
_THREAD_CHECKS, _THREAD_SECONDS = 100, 0.001
_PR_SET_PDEATHSIG = 1
_numbers = itertools.count()
_runner = pytest.StashKey["_Runner | None"]()


class _Child:
    """A fork of the worker, which runs the tests of units, one after the other."""

    def __init__(
        self, session: pytest.Session, made: worker.Worker, numbers: Mapping[pytest.Item, int]
    ) -> None:
        """numbers: of the session's items."""
        self.can_continue = False
        """Whether it has left its last node, and can run tests of another one."""
        self.status: int | None = None
        """Its exit status, as `subprocess` has it; None until its end."""
        self.offers = made.offers()
        self._node: str | None = None
        self._numbers = numbers
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, warnings.catch_warnings():
            # Since Python 3.12, of threads: those of xdist, which no child uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            _cancel_fault_timer()
            self._pid = os.fork()
            if self._pid == 0:
                # As tests/conftest.py did: since Python 3.12 a fork forgets it (CPython gh-66285).
                asyncio.set_event_loop(None)
                self._connection.close()
                _serve(session, theirs)

    def enter(self, node_name: str) -> None:
        """Have the next test run on this new node."""
        self._node = node_name
        self._send(node_name)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """nextitem: of the same unit; None for the last one, which ends the unit's fixtures."""
        following = None if nextitem is None else self._numbers[nextitem]
        self.can_continue = False
        _cancel_fault_timer()
        self._send((self._numbers[item], following))
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self.end()
            return [_crash_report(item, self.status)]
        if isinstance(answer, BaseException):
            raise answer
        contents, self.can_continue = answer
        if self.can_continue:
            self._remove_node()
        return [_decode(item, content) for content in contents]

    def end(self) -> None:
        """Kill what is on its node."""
        if self.status is not None:
            return
        self._connection.close()
        self._remove_node()
        _, status = os.waitpid(self._pid, 0)
        self.status = os.waitstatus_to_exitcode(status)

    def _send(self, request: str | tuple[int, int | None]) -> None:
        # If it has ended, `run` finds that.
        with contextlib.suppress(ConnectionError):
            self._connection.send(request)

    def _remove_node(self) -> None:
        if self._node is not None:
            node.remove(self._node)
            self._node = None


def _cancel_fault_timer() -> None:
    """Of `faulthandler_timeout`: a child has its own, and ends alone. The thread of this one would
    not be in a child, where pytest cancels it again."""
    faulthandler.cancel_dump_traceback_later()


class _Runner:
    """Runs each kernel test of a worker in the unit that it belongs to."""

    def __init__(self, made: worker.Worker, session: pytest.Session) -> None:
        self._worker = made
        self._session = session
        self._child: _Child | None = None
        self._unit = ""
        """The key of the unit whose tests the child runs; empty between two."""
        self._items = {item: number for number, item in enumerate(session.items)}
        self._fixtures: dict[str, set[str]] = collections.defaultdict(set)
        for item in session.items:
            self._fixtures[_key(item)].update(getattr(item, "fixturenames", ()))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        key = _key(item)
        child = self._child if self._child and self._unit else self._start(key)
        if nextitem is not None and _key(nextitem) != key:
            nextitem = None
        try:
            found = child.run(item, nextitem)
        finally:
            if nextitem is None or child.status is not None:
                self._unit = ""
                if not child.can_continue:
                    self._end_child()
        for report in found:
            report.user_properties.append((balance.UNIT, key))
        return found

    def close(self) -> None:
        self._end_child()
        self._worker.close()

    def _start(self, key: str) -> _Child:
        """The child for this unit, on its node."""
        offers = self._make(self._fixtures[key])
        if self._child and not offers <= self._child.offers:
            self._end_child()
        child = self._child or _Child(self._session, self._worker, self._items)
        if not key.endswith(_NO_NODE):
            child.enter(f"{self._worker.cgroup}/{next(_numbers)}")
        self._child, self._unit = child, key
        return child

    def _make(self, fixtures: Collection[str]) -> set[str]:
        """What the tests of a unit share with those of others, as it was when it was made. Returns
        what of it a child must have been forked with."""
        needed = {name for name in worker.OFFERS if name in fixtures}
        # A test fails by the same error when its fixture makes them.
        with contextlib.suppress(Exception):
            self._worker.offer(needed)
        return needed

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def start(session: pytest.Session, made: worker.Worker) -> None:
    """Run the session's kernel tests on nodes of this worker."""
    session.config.stash[_runner] = _Runner(made, session)


def is_kernel_test(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("kernel") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a unit follow each other; of a worker's units, the longest comes first."""
    files: dict[str, int] = {}
    for item in items:
        files.setdefault(_file(item), len(files))
    items.sort(key=lambda item: (files[_file(item)], is_kernel_test(item), _has_own_node(item)))
    if hasattr(config, "workerinput"):
        balance.sort(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    found = item.config.stash.get(_runner, None)
    if found is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports.send(item, found.run(item, nextitem))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    """A unit has the timer of its tests."""
    return True if item.config.stash.get(_runner, None) else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if found := session.config.stash.get(_runner, None):
        found.close()


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _has_own_node(item: pytest.Item) -> bool:
    shares = item.get_closest_marker(FILE_NODE) or item.get_closest_marker(SHARED_NODE)
    return not shares and OWN_NODE in getattr(item, "fixturenames", ())


def _key(item: pytest.Item) -> str:
    if not is_kernel_test(item):
        return f"{_file(item)}{_NO_NODE}"
    if item.get_closest_marker(SHARED_NODE):
        return SHARED_NODE
    return item.nodeid if _has_own_node(item) else _file(item)


class _InChild:
    """Plugin of a child: reports go to the worker's process."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []
        """Of the last test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self.reports = runner.runtestprotocol(item, log=False, nextitem=nextitem)
        return True


def _serve(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run tests until the worker closes its end."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # What exists now stays shared with the worker.
        gc.freeze()
        session.config.stash[_runner] = None
        plugin = _InChild()
        session.config.pluginmanager.register(plugin)
        encode = session.config.hook.pytest_report_to_serializable
        leftovers.begin()
        before = _attributes()
        for request in _requests(connection):
            if isinstance(request, str):
                node.enter(request)
                continue
            number, following = request
            nextitem = None if following is None else session.items[following]
            item = session.items[number]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            can_continue = (
                nextitem is None
                and node.current is not None
                and all(report.passed for report in plugin.reports)
                and _is_again(before)
            )
            if can_continue:
                node.leave()
            found = reports.needed(session.config, plugin.reports)
            encoded = [encode(config=session.config, report=one) for one in found]
            connection.send((encoded, can_continue))
        status = 0
    except (pytest.exit.Exception, KeyboardInterrupt) as error:
        connection.send(type(error)(*error.args))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _requests(connection: Connection) -> Iterator[str | tuple[int, int | None]]:
    """Names of nodes to enter, and tests: the item's number, and that of the unit's next one."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def _is_again(before: tuple[object, ...]) -> bool:
    """A thread of faulthandler may be at its end: it cannot be waited for by a join."""
    for _ in range(_THREAD_CHECKS):
        if _attributes() == before:
            return True
        time.sleep(_THREAD_SECONDS)
    return False


def _attributes() -> tuple[object, ...]:
    """Of the process: what outlasts a test that does not set it back, besides memory."""
    status = pathlib.Path("/proc/self/status").read_text("ascii")
    return (
        [line for line in status.splitlines() if line.startswith(_KEPT)],
        pathlib.Path("/proc/self/limits").read_bytes(),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.getcwd(),
    )


def _decode(item: pytest.Item, content: object) -> pytest.TestReport:
    decode = item.config.hook.pytest_report_from_serializable
    report = decode(config=item.config, data=content)
    assert isinstance(report, pytest.TestReport)
    return report


def _crash_report(item: pytest.Item, status: int | None) -> pytest.TestReport:
    assert status is not None
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    what = f"the process of this test ended {how}"
    return pytest.TestReport(item.nodeid, item.location, keywords, "failed", what, "call")

"""Plugin of pytest: kernel tests run in processes of their own, each on a node of its own.

A test that changes its node (fixture `own_node`) has one for itself; the others of a file share
one, and those with the mark `shared_node` one for the whole run. The worker's process forks a child
for each node, which runs the tests and sends back their reports. So whatever a test leaves ends
with its node, and reaches no other.

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
import signal
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Literal, NoReturn

import pytest
from _pytest import runner

from tests.nodes import balance, node, worker

OWN_NODE = "own_node"
"""The fixture of tests that need a node for themselves."""
FILE_NODE = "file_node"
"""The mark of tests that share a node, though they change it, for what is expensive to make."""
SHARED_NODE = "shared_node"
"""The mark of tests that have one node for the whole run."""

_NO_NODE = " on no node"
"""What the keys of units end with whose tests are no kernel tests."""

_PR_SET_PDEATHSIG = 1
_numbers = itertools.count()
_runner = pytest.StashKey["_Runner | None"]()


class _Unit:
    """A child, on a node of its own if that has a name. key: what its tests have in common;
    numbers: of the session's items."""

    def __init__(
        self,
        session: pytest.Session,
        name: str | None,
        key: str,
        numbers: Mapping[pytest.Item, int],
    ) -> None:
        self.key = key
        self.status: int | None = None
        """The child's exit status, as `subprocess` has it; None until its end."""
        self._name = name
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
                _serve(session, name, theirs)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """nextitem: of the same unit; None for the last one, which ends the unit's fixtures."""
        following = None if nextitem is None else self._numbers[nextitem]
        _cancel_fault_timer()
        try:
            self._connection.send((self._numbers[item], following))
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self.end()
            return [_crash_report(item, self.status)]
        if isinstance(answer, BaseException):
            raise answer
        return [_decode(item, content) for content in answer]

    def end(self) -> None:
        """Kill what is on the node."""
        if self.status is not None:
            return
        self._connection.close()
        if self._name is not None:
            node.remove(self._name)
        _, status = os.waitpid(self._pid, 0)
        self.status = os.waitstatus_to_exitcode(status)


def _cancel_fault_timer() -> None:
    """Of `faulthandler_timeout`: a unit has its own, and ends alone. The thread of this one would
    not be in a child, where pytest cancels it again."""
    faulthandler.cancel_dump_traceback_later()


class _Runner:
    """Runs each kernel test of a worker in the unit that it belongs to."""

    def __init__(self, made: worker.Worker, session: pytest.Session) -> None:
        self._worker = made
        self._unit: _Unit | None = None
        self._items = {item: number for number, item in enumerate(session.items)}
        self._fixtures: dict[str, set[str]] = collections.defaultdict(set)
        for item in session.items:
            self._fixtures[_key(item)].update(getattr(item, "fixturenames", ()))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        key = _key(item)
        if self._unit is None:
            self._unit = self._start(item.session, key)
        if nextitem is not None and _key(nextitem) != key:
            nextitem = None
        try:
            reports = self._unit.run(item, nextitem)
        finally:
            if nextitem is None or self._unit.status is not None:
                self._end_unit()
        for report in reports:
            report.user_properties.append((balance.UNIT, key))
        return reports

    def close(self) -> None:
        self._end_unit()
        self._worker.close()

    def _start(self, session: pytest.Session, key: str) -> _Unit:
        if key.endswith(_NO_NODE):
            return _Unit(session, None, key, self._items)
        # A test fails by the same error when its fixture makes them.
        with contextlib.suppress(Exception):
            if "moving_copies" in self._fixtures[key]:
                self._worker.shared().load_moving_copies()
            if "loaded" in self._fixtures[key]:
                self._worker.shared().restore()
            if {"installed", "installed_pins"} & self._fixtures[key]:
                self._worker.installed().restore()
            if "launch" in self._fixtures[key]:
                self._worker.fork_server()
        name = f"{self._worker.cgroup}/{next(_numbers)}"
        return _Unit(session, name, key, self._items)

    def _end_unit(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.end()


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
    for report in found.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
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


class _InUnit:
    """Plugin of a unit's process: reports go to the worker's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        encode = item.config.hook.pytest_report_to_serializable
        reports = runner.runtestprotocol(item, log=False, nextitem=nextitem)
        self._connection.send([encode(config=item.config, report=one) for one in reports])
        return True


def _serve(session: pytest.Session, name: str | None, connection: Connection) -> NoReturn:
    """Run tests until the worker closes its end."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # What exists now stays shared with the worker.
        gc.freeze()
        if name is not None:
            node.enter(name)
        session.config.stash[_runner] = None
        session.config.pluginmanager.register(_InUnit(connection))
        for number, following in _requests(connection):
            nextitem = None if following is None else session.items[following]
            item = session.items[number]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        status = 0
    except (pytest.exit.Exception, KeyboardInterrupt) as error:
        connection.send(type(error)(*error.args))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _requests(connection: Connection) -> Iterator[tuple[int, int | None]]:
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


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

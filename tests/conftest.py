"""Shared by all tests: kernel tests run inside their own namespaces, or fail with one sentence.

When a kernel test is selected, the whole pytest process moves into a network and a mount namespace
before the first test runs, while it still has one thread. Kernel tests run on nodes below it
(tests/nodes). A kernel test that cannot have that fails; it is never skipped, so a green run means
that the kernel was tested.
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import pathlib
from collections.abc import Iterator

import hypothesis
import pytest
import pytest_asyncio.plugin
from looptime._internal import plugin as looptime_plugin

from agent.lab import lab as labs
from agent.lab.agent_process import Launch
from tests import blocking, reports
from tests.nodes import balance, leftovers, units
from tests.nodes.worker import Worker, problem_of
from tests.polling import PATIENCE

pytest_plugins = ["tests.twice", "tests.skips"]

_problem = pytest.StashKey[str]()
_worker = pytest.StashKey[Worker]()

# The same examples in each run, so that a change is what makes it red; `make fuzz` tries new ones.
# An example may take longer than Hypothesis' deadline of 200 ms on a busy machine; each test has a
# time limit of its own.
_property_tests = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("podgate", _property_tests, derandomize=True, database=None)
# Hypothesis' own default in CI has the same ones, too.
hypothesis.settings.register_profile(
    "new-examples", _property_tests, derandomize=False, database=None
)
hypothesis.settings.load_profile("podgate")

# The longest takes a minute alone on an idle machine; beside a load, or on a machine emulated in
# software (`PATIENCE`), it takes several times as long.
_KERNEL_TEST_SECONDS = 600 * PATIENCE


# Each test in them has the mark `kernel`.
_ONLY_KERNEL = [pathlib.Path(__file__).parent / name for name in ("kernel", "node", "page")]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """A run of one kind does not import the files that have none of it: each worker would."""
    wanted = config.option.markexpr
    is_other = (wanted == "not kernel" and collection_path in _ONLY_KERNEL) or (
        wanted == "kernel" and _has_only_unit_tests(collection_path)
    )
    return True if is_other else None


def _has_only_unit_tests(path: pathlib.Path) -> bool:
    """The tests of a cluster get their mark from its conftest.py."""
    is_test = path.name.startswith("test_") and path.suffix == ".py"
    if not is_test or path.is_relative_to(pathlib.Path(__file__).parent / "cluster"):
        return False
    return b"mark.kernel" not in path.read_bytes()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Without the search for garbage, which doubles its time. What is collected stays until the end
    of the run, so no later search, of a third of a second each, goes through it either.
    """
    gc.disable()
    try:
        with _one_before_others(session.config):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _one_before_others(config: pytest.Config) -> Iterator[None]:
    """In a new clone the first worker compiles the tests, and the others read what it has written.
    At once, each would compile all of them, which takes longer than all else in collection."""
    cache = getattr(config, "cache", None)  # a run may be without
    if cache is None or not hasattr(config, "workerinput"):
        yield
        return
    with (cache.mkdir("collection") / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test without the mark in these directories would run nowhere."""
    is_among_them = any(item.path.is_relative_to(path) for path in _ONLY_KERNEL)
    if is_among_them and not item.get_closest_marker("kernel"):
        raise pytest.UsageError(f"{item.nodeid} lacks @pytest.mark.kernel")


def pytest_addoption(parser: pytest.Parser) -> None:
    balance.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (reports, units, balance):
        config.pluginmanager.register(plugin)
    # Only loops of tests with fake time. looptime replaces methods of all, and searches the names
    # of pytest-asyncio at each fixture of each test.
    looptime_plugin._should_patch = _has_fake_time


def _has_fake_time(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> bool:
    is_loop = fixturedef.func.__module__ == pytest_asyncio.plugin.__name__
    return is_loop and request.node.get_closest_marker("looptime") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests their time limit, unless the command line sets one (`--timeout`), and let fake
    time pass after ten turns of the loop without an event: servers in it answer within one or two,
    and the usual 42 took a fifth of the time of all tests with fake time.
    """
    for item in items:
        marker = item.get_closest_marker("looptime")
        if marker and marker.args != (False,):
            item.add_marker(pytest.mark.looptime(noop_cycles=10))
    if config.getoption("timeout") is not None:
        return
    unit_seconds = float(config.getini("timeout")) * PATIENCE
    for item in items:
        if not item.get_closest_marker("timeout"):
            is_kernel = item.get_closest_marker("kernel") is not None
            item.add_marker(
                pytest.mark.timeout(_KERNEL_TEST_SECONDS if is_kernel else unit_seconds)
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Isolate before any test runs: later there may be threads, which would stay behind."""
    # Otherwise pytest-asyncio gets the current event loop, which creates one that is never closed.
    asyncio.set_event_loop(None)
    is_needed = any(units.is_kernel_test(item) for item in session.items)
    if not is_needed or session.config.option.collectonly:
        return
    try:
        made = Worker(_run_directory(session.config))
    except OSError as error:
        session.config.stash[_problem] = problem_of(error)
        return
    session.config.stash[_problem] = ""
    session.config.stash[_worker] = made
    units.start(session, made)


@pytest.fixture(scope="session")
def isolated(pytestconfig: pytest.Config) -> None:
    """The process is in a "node" namespace without uplink, and has a bpffs of its own. It and what
    it starts use programs that were compiled once in the run."""
    problem = pytestconfig.stash.get(_problem, "the test lacks @pytest.mark.kernel")
    if problem:
        pytest.fail(problem, pytrace=False)
    pytestconfig.stash[_worker].prebuilt_programs()


@pytest.fixture(scope="session")
def worker(isolated: None, pytestconfig: pytest.Config) -> Worker:
    """What all tests of this worker share."""
    return pytestconfig.stash[_worker]


@pytest.fixture(scope="session")
def prebuilt_programs(worker: Worker) -> pathlib.Path:
    """A directory of compiled programs as an image has them."""
    return worker.prebuilt_programs()


@pytest.fixture(scope="session")
def launch(worker: Worker) -> Launch:
    """For `AgentProcess`: agents that need not import podgate first."""
    return worker.fork_server().start


@pytest.fixture
def own_node(isolated: None) -> None:
    """The test has a node for itself (tests/nodes/units.py)."""


@pytest.fixture(autouse=True)
def _kernel_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kernel"):
        request.getfixturevalue("isolated")


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Not in kernel tests: there agents are separate processes, and tests in this process inspect
    the kernel, which blocks.
    """
    if request.node.get_closest_marker("kernel"):
        yield
        return
    with blocking.forbidden():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A kernel test fails with the name of each object that it leaves on its node."""
    with leftovers.checked():
        yield


@contextlib.contextmanager
def fresh_lab() -> Iterator[labs.Lab]:
    """The `lab` fixture for those who keep one longer than a test; one at a time."""
    with leftovers.lasting(), labs.Lab() as made:
        yield made


@pytest.fixture
def lab(own_node: None) -> Iterator[labs.Lab]:
    """A fresh node without pods; what the test adds is gone after it, failed or not."""
    with labs.Lab() as made:
        yield made


def _run_directory(config: pytest.Config) -> pathlib.Path:
    """Of the run, for all of its workers."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    directory = factory.getbasetemp()
    return directory.parent if "PYTEST_XDIST_WORKER" in os.environ else directory

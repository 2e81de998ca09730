"""Shared by all tests: kernel tests run inside their own namespaces, or fail with one sentence.

When a kernel test is selected, the whole pytest process moves into a network and a mount namespace
before the first test runs, while it still has one thread. A kernel test that cannot have that
fails; it is never skipped, so a green run means that the kernel was tested.
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import pathlib
import subprocess
from collections.abc import Iterator

import hypothesis
import pytest

from agent.lab import lab as labs
from agent.lab.agent_process import Launch
from agent.linux import network_setup
from bpf import artefacts, compiling, errors, features, syscalls
from bpf.compiler import PROGRAM_SETS
from tests import blocking
from tests.forkserver import ForkServer
from tests.polling import PATIENCE

pytest_plugins = ["tests.twice"]

_problem = pytest.StashKey[str]()

# An example may take longer than Hypothesis' deadline of 200 ms on a busy machine; each test has a
# time limit of its own.
hypothesis.settings.register_profile(
    "podgate", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("podgate")

# The longest takes a minute alone on an idle machine; beside a load, or on a machine emulated in
# software (`PATIENCE`), it takes several times as long.
_KERNEL_TEST_SECONDS = 600 * PATIENCE


# Each test in them has the mark `kernel`.
_ONLY_KERNEL = [pathlib.Path(__file__).parent / name for name in ("kernel", "node", "page")]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Unit tests do not import what has none of them, a third of all."""
    is_unit = config.option.markexpr == "not kernel"
    return True if is_unit and collection_path in _ONLY_KERNEL else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the search for garbage, which doubles its time. What is collected stays until the end
    of the run, so no later search, of a third of a second each, goes through it either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test without the mark in these directories would run nowhere."""
    is_among_them = any(item.path.is_relative_to(path) for path in _ONLY_KERNEL)
    if is_among_them and not item.get_closest_marker("kernel"):
        raise pytest.UsageError(f"{item.nodeid} lacks @pytest.mark.kernel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give kernel tests their time limit, unless the command line sets one (`--timeout`), and let
    fake time pass after ten turns of the loop without an event: servers in it answer within one or
    two, and the usual 42 took a fifth of the time of all tests with fake time.
    """
    for item in items:
        marker = item.get_closest_marker("looptime")
        if marker and marker.args != (False,):
            item.add_marker(pytest.mark.looptime(noop_cycles=10))
    if config.getoption("timeout") is not None:
        return
    for item in items:
        if item.get_closest_marker("kernel") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_KERNEL_TEST_SECONDS))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Isolate before any test runs: later there may be threads, which would stay behind."""
    # Otherwise pytest-asyncio gets the current event loop, which creates one that is never closed.
    asyncio.set_event_loop(None)
    is_needed = any(item.get_closest_marker("kernel") for item in session.items)
    if is_needed and not session.config.option.collectonly:
        session.config.stash[_problem] = _isolate()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped kernel test is a failure: a green run means that the kernel was tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    skipped = [r.nodeid for r in reporter.stats.get("skipped", []) if "kernel" in r.keywords]
    if skipped:
        reporter.write_line(f"kernel tests were skipped in CI: {', '.join(skipped)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def isolated(pytestconfig: pytest.Config) -> None:
    """The process is in a "node" namespace without uplink, and has a bpffs of its own."""
    problem = pytestconfig.stash.get(_problem, "the test lacks @pytest.mark.kernel")
    if problem:
        pytest.fail(problem, pytrace=False)


@pytest.fixture(scope="session")
def prebuilt_programs(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory of compiled programs as an image has them, which this process and all that it
    starts use: one compile for all workers of a run instead of one for each installation.

    Where the environment names one already, it is used.
    """
    if given := os.environ.get(artefacts.DIRECTORY_VARIABLE):
        return pathlib.Path(given)
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    made = directory / "programs"
    with (directory / "programs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            unfinished = directory / "programs-unfinished"
            unfinished.mkdir()
            for programs in PROGRAM_SETS:
                used = features.offered(programs.features)
                artefact = asyncio.run(compiling.compile_in_process(programs, used))
                artefacts.path(unfinished, programs, used).write_bytes(artefact.encode())
            unfinished.rename(made)
    os.environ[artefacts.DIRECTORY_VARIABLE] = str(made)
    return made


@pytest.fixture(scope="session")
def launch(isolated: None) -> Iterator[Launch]:
    """For `AgentProcess`: agents that need not import podgate first."""
    server = ForkServer()
    yield server.start
    server.close()


@pytest.fixture(autouse=True)
def _kernel_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kernel"):
        request.getfixturevalue("isolated")
        request.getfixturevalue("prebuilt_programs")


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


@contextlib.contextmanager
def fresh_lab() -> Iterator[labs.Lab]:
    """The `lab` fixture for those who keep one longer than a test; one at a time."""
    _reset_loopback()
    try:
        with labs.Lab() as made:
            yield made
    finally:
        _reset_loopback()


@pytest.fixture
def lab(isolated: None) -> Iterator[labs.Lab]:
    """A fresh node without pods; what the test adds is gone after it, failed or not."""
    with fresh_lab() as made:
        yield made


def _isolate() -> str:
    """One sentence of what is missing, or nothing."""
    try:
        labs.isolate()
        syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, 0)
    except errors.BpfError as error:
        return f"kernel tests need a kernel with BPF and the right to use it ({error.strerror})"
    except OSError as error:
        return f"kernel tests need root and a kernel with namespaces and BPF ({error.strerror})"
    _reset_loopback()
    # Pods of consecutive tests have the same addresses, and after the first six errors the kernel
    # sends each address one a second.
    for version, name in ((4, "ipv4/icmp_ratelimit"), (6, "ipv6/icmp/ratelimit")):
        if network_setup.has_ip_version(version):
            network_setup.write_sysctl(name, "0")
    return ""


def _reset_loopback() -> None:
    """Only 127.0.0.1 and ::1, and up: servers of other tests listen there too."""
    script = "link set lo down\naddress flush dev lo\nlink set lo up\n"
    subprocess.run(["ip", "-batch", "-"], input=script, text=True, check=True)

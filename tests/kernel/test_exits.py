"""`podgate off --node` and `podgate cleanup` open the node whatever the agent does, and whatever
the run directory can take: they write nothing before they have detached."""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of, execute
from agent.lab.lab import Lab, LabPod
from agent.labels import ISOLATION_READY
from agent.logs import Event
from bpf import pins
from tests import processes
from tests.kernel import attached
from tests.polling import PATIENCE, PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.kernel

PORT = 8080
PROBE = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 3600}}
# From a command's first instruction until the gates are open.
OPEN_SECONDS = 1.0 * PATIENCE
MS_RDONLY, MS_REMOUNT = 1, 32
_libc = ctypes.CDLL(None, use_errno=True)

Exhaust = Callable[[pathlib.Path], None]


def _fill(directory: pathlib.Path) -> None:
    """Until not a byte can be written."""
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        (directory / "another").write_bytes(b"1")
    (directory / "another").unlink()


def _use_inodes(directory: pathlib.Path) -> None:
    """Until no file can be created."""
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (directory / f"filler{number}").touch()
    with pytest.raises(OSError, match="No space left"):
        (directory / "another").touch()


def _remount_read_only(directory: pathlib.Path) -> None:
    """Once the agent, which may be saving its state, has no file of it open for writing (EBUSY)."""
    wait_until("a read-only directory", lambda: _mount(directory, "", MS_REMOUNT | MS_RDONLY))


def _mount(directory: pathlib.Path, options: str, flags: int = 0) -> bool:
    """Whether it is done; not while a file is open for writing there."""
    done: int = _libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", flags, options.encode())
    problem = ctypes.get_errno()
    assert done == 0 or problem == errno.EBUSY, os.strerror(problem)
    return done == 0


RUN_DIRECTORIES: dict[str, Exhaust] = {
    "fine": lambda _: None,
    "full": _fill,
    "read-only": _remount_read_only,
    "no inodes": _use_inodes,
}
AGENTS = ("alive", "hung", "dead", "starting", "locked out")


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1, bridged=True)
    with pod.listen(PORT):
        yield pod


@pytest.fixture
def run_directory(operator: AgentProcess) -> Iterator[pathlib.Path]:
    """The operator's, a file system of its own, as /run is."""
    operator.run_directory.mkdir()
    assert _mount(operator.run_directory, "size=256k,nr_inodes=128,mode=0755")
    yield operator.run_directory
    operator.stop(signal.SIGKILL)
    assert _libc.umount2(os.fsencode(operator.run_directory), 2) == 0


def start(operator: AgentProcess, web: LabPod) -> None:
    operator.write_manifest(web, mode="enforce", container=PROBE)
    operator.start("--mode", "enforce")
    operator.wait_for("enforce", lambda report: isolated_as(report, "Enforced"))


def isolated_as(report: AgentReport, reason: str) -> bool:
    condition = condition_of(report, "web", ISOLATION_READY)
    return condition is not None and condition.reason == reason


def is_off(report: AgentReport) -> bool:
    return report.max_mode == "off" and not report.in_force


def is_closed(pod: LabPod) -> bool:
    result = attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=True)
    return result in (attempts.REFUSED, attempts.DROPPED)


def is_open(pod: LabPod) -> bool:
    return attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=True) == "connects"


def hangs(operator: AgentProcess) -> bool:
    """Stop the agent, unless it is writing to a file of its run directory: it continues then."""
    os.kill(operator.pid, signal.SIGSTOP)
    for path in pathlib.Path(f"/proc/{operator.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            is_written = os.lstat(path).st_mode & stat.S_IWUSR
            if is_written and path.readlink().is_relative_to(operator.run_directory):
                os.kill(operator.pid, signal.SIGCONT)
                return False
    return True


@contextlib.contextmanager
def agent_in_state(state: str, operator: AgentProcess) -> Iterator[None]:
    """From an agent that runs; at the end one that hung continues."""
    with contextlib.ExitStack() as undo:
        if state in ("dead", "starting", "locked out"):
            operator.stop(signal.SIGKILL)
        if state == "starting":
            lines = len(operator.log_lines(Event.PROGRAMS_LOADED))
            operator.start("--mode", "enforce")
            wait_until(
                "an agent between its lock and its first gate",
                lambda: len(operator.log_lines(Event.PROGRAMS_LOADED)) > lines,
            )
        if state in ("hung", "starting"):
            undo.callback(os.kill, operator.pid, signal.SIGCONT)
            wait_until("an agent that hangs and saves nothing", lambda: hangs(operator))
        if state == "locked out":
            lock = os.open(operator.run_directory, os.O_RDONLY)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def run_until_open(
    operator: AgentProcess, web: LabPod, space: str, *command: str
) -> "tuple[subprocess.CompletedProcess[str], float]":
    """A command of podgate beside connects to the pod. Returns its end, and the seconds from its
    first instruction until the pod was open: with its imports, of half a second of CPU time, where
    the run directory is fine. Without the time for which command and test waited for a processor.
    """
    launch = execute if space == "fine" else operator.launch_command
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    arguments = [*command, *where]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        waited, started = processes.waited_ns("thread-self"), time.monotonic()
        process = launch(arguments, output, errors)
        of_command = 0

        def is_done() -> bool:
            nonlocal of_command
            of_command = max(of_command, processes.waited_ns(str(process.pid)))
            return is_open(web) or process.poll() is not None

        wait_until("an open pod", is_done)
        seconds = time.monotonic() - started
        waited = processes.waited_ns("thread-self") - waited + of_command
        seconds -= waited / 1e9
        status = process.wait(PATIENCE_SECONDS)
        written = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (output, errors)]
    return subprocess.CompletedProcess(arguments, status, *written), seconds


@pytest.mark.parametrize("state", AGENTS)
@pytest.mark.parametrize("space", RUN_DIRECTORIES)
def test_off_opens_the_node_and_an_agent_that_continues_attaches_nothing(
    operator: AgentProcess,
    run_directory: pathlib.Path,
    web: LabPod,
    state: str,
    space: str,
    record_property: Callable[[str, object], None],
) -> None:
    start(operator, web)
    assert is_closed(web)
    installation = pins.Pins(operator.bpffs)
    with agent_in_state(state, operator):
        RUN_DIRECTORIES[space](run_directory)
        wait = "0" if state in ("hung", "starting", "locked out") else f"{PATIENCE_SECONDS:.0f}"
        done, seconds = run_until_open(operator, web, space, "off", "--node", "--timeout", wait)
        record_property("open_seconds", round(seconds, 2))
        assert done.returncode == 0, done.stderr
        assert seconds < OPEN_SECONDS
        assert attached.everything(installation) == []
    if state == "starting" and space == "read-only":
        operator.event(Event.AGENT_STARTED)  # there is no place for its admin socket
    elif state in ("alive", "hung", "starting"):
        operator.wait_for("off", is_off)
    assert is_open(web)
    wait_until("nothing attached", lambda: attached.everything(installation) == [])


@pytest.mark.parametrize("state", AGENTS)
@pytest.mark.parametrize("space", RUN_DIRECTORIES)
def test_cleanup_opens_the_node_and_removes_all_objects(
    operator: AgentProcess,
    run_directory: pathlib.Path,
    web: LabPod,
    state: str,
    space: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Beside an agent its mark stays, for that not to attach anything again."""
    start(operator, web)
    installation = pins.Pins(operator.bpffs)
    with agent_in_state(state, operator):
        RUN_DIRECTORIES[space](run_directory)
        done, seconds = run_until_open(operator, web, space, "cleanup")
        record_property("open_seconds", round(seconds, 2))
        assert seconds < OPEN_SECONDS
        assert attached.everything(installation) == []
        assert [path for path in installation.root.rglob("*") if path.is_file()] == []
        if state == "dead":
            assert done.returncode == 0, done.stderr
            assert not installation.root.exists()
        else:
            assert done.returncode == 1
            assert "stays off; stop it, and repeat" in done.stderr
    if state in ("alive", "hung"):
        operator.wait_for("off", is_off)
    assert is_open(web)
    operator.stop(signal.SIGKILL)
    done = operator.cleanup()
    assert attached.everything(installation) == []
    assert not installation.root.exists()


@pytest.mark.parametrize("space", list(RUN_DIRECTORIES)[1:])
def test_agent_starts_and_gates_without_room_and_saves_once_there_is(
    operator: AgentProcess, run_directory: pathlib.Path, web: LabPod, space: str
) -> None:
    operator.write_manifest(web, mode="enforce", container=PROBE)
    RUN_DIRECTORIES[space](run_directory)
    operator.start("--mode", "enforce")
    wait_until("a closed pod", lambda: is_closed(web))
    operator.event(Event.CNI_STATE_NOT_WRITTEN)

    if space == "read-only":
        assert _mount(run_directory, "", MS_REMOUNT)
    for filler in run_directory.glob("filler*"):
        filler.unlink()
    operator.wait_for("enforce", lambda report: isolated_as(report, "Enforced"))
    state = run_directory / "state"
    wait_until("saved state", lambda: _is_saved(run_directory / "cni.json", state / "probes.json"))
    assert not list(state.glob(".*.new"))


def _is_saved(*paths: pathlib.Path) -> bool:
    return all(path.exists() and json.loads(path.read_bytes()) for path in paths)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["cni.json", "state/modes.json", "state/probes.json"])
def test_fifo_or_directory_in_place_of_a_state_file_is_replaced(
    operator: AgentProcess, web: LabPod, name: str, make: Callable[[pathlib.Path], None]
) -> None:
    (operator.run_directory / "state").mkdir(parents=True)
    make(operator.run_directory / name)
    start(operator, web)
    assert is_closed(web)
    operator.stop(signal.SIGTERM)
    path = operator.run_directory / name
    assert path.is_file() or name.endswith("modes.json")

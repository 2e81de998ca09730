"""A process without rights (user 65534) holds what an agent needs to start: locks, ports,
connections, directories. The next agent starts nevertheless, so the gates stay closed.
"""

import fcntl
import os
import pathlib
import resource
import signal
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.linux import namespaces
from agent.logs import Event
from bpf import pins
from tests import unprivileged
from tests.kernel.secondagent import SecondAgent
from tests.kernel.test_agent import PORT, isolated_as, refuses, start_enforcing
from tests.kernel.test_standby import _held_by, take_over
from tests.kernel.test_standin import beat_long_ago
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

PORT_OF_HEALTH = 9650


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


@pytest.fixture
def operator(operator: AgentProcess) -> Iterator[AgentProcess]:
    """Its run directory can be entered by every user, as /run/podgate can."""
    with unprivileged.visible_directory() as directory:
        operator.run_directory = directory / "run"
        yield operator
        operator.stop(signal.SIGKILL)


@pytest.mark.parametrize("kind", ["ex", "sh"])
def test_locks_that_a_user_holds_keep_no_agent_out_and_no_gate_opens(
    operator: AgentProcess, web: LabPod, kind: str
) -> None:
    start_enforcing(operator, web)
    with unprivileged.running(unprivileged.FLOCK, str(operator.run_directory), kind) as held:
        assert int(held)
        operator.stop(signal.SIGKILL)
        # The dead-man would open all gates: the time without an agent is over its limit.
        beat_long_ago(operator.bpffs)
        operator.start("--dead-man-hours", "0.001")
        operator.wait_for("the gate", isolated_as("web", "Enforced"))
        assert refuses(web)
        assert refuses(web, "IPv6")


def test_locks_that_a_user_holds_keep_no_roll_out_from_its_end(
    operator: AgentProcess, second: SecondAgent, web: LabPod, tmp_path: pathlib.Path
) -> None:
    operator.write_manifest(web, mode="enforce", container={})
    first = SecondAgent(operator, tmp_path / "first")
    first.start_standby()
    first.wait_for("the gate", _held_by(first))
    try:
        with unprivileged.running(unprivileged.FLOCK, str(operator.run_directory), "ex"):
            second.run_directory = operator.run_directory
            take_over(first, second)
            second.stop(signal.SIGKILL)
            first.wait_for("the first again", _held_by(first))
    finally:
        first.stop(signal.SIGKILL)


def test_locks_that_a_user_holds_do_not_keep_podgate_on_the_node(
    operator: AgentProcess, web: LabPod
) -> None:
    start_enforcing(operator, web)
    with unprivileged.running(unprivileged.FLOCK, str(operator.run_directory), "ex"):
        operator.stop(signal.SIGKILL)
        done = operator.cleanup()
    assert done.returncode == 0, done.stderr
    assert not refuses(web)


HOLD_AS_ROOT = """
import fcntl, os, sys
descriptors = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]
for descriptor in descriptors:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_agent_of_a_version_with_other_locks_runs_beside_no_agent_of_this_one(
    operator: AgentProcess, web: LabPod
) -> None:
    """It locks the two directories themselves."""
    start_enforcing(operator, web)
    operator.stop(signal.SIGKILL)
    directories = [str(operator.run_directory), str(pins.Pins(operator.bpffs).root)]
    with subprocess.Popen(
        ["python3", "-c", HOLD_AS_ROOT, *directories],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as previous:
        assert previous.stdin
        assert previous.stdout
        previous.stdout.readline()
        operator.start("--standby-seconds", "600")
        operator.event(Event.STANDBY_WAITING)
        previous.stdin.close()
        previous.wait()
    operator.event(Event.STANDBY_TAKING_OVER)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    # And the other way round.
    with pytest.raises(BlockingIOError):
        hold(operator.run_directory)


def hold(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("how", ["listening", "bound"])
def test_port_that_a_user_holds_keeps_no_agent_out_and_is_reported(
    operator: AgentProcess, web: LabPod, how: str
) -> None:
    address = f"127.0.0.1:{PORT_OF_HEALTH}"
    with unprivileged.running(
        unprivileged.SQUAT_PORT, "127.0.0.1", str(PORT_OF_HEALTH), how
    ) as process:
        operator.write_manifest(web, mode="enforce", container={})
        operator.start("--http-address", address)
        operator.wait_for("the gate", isolated_as("web", "Enforced"))
        line = operator.event(Event.HTTP_NOT_SERVED)
        report = operator.wait_for("the problem", lambda report: bool(report.server_problems))
        assert report.http_address == ""
        (problem,) = report.server_problems
        assert address in problem
        assert f"process {process}" in problem or how == "bound"
        assert "of user 65534" in problem or "has bound the port" in problem
        assert line["error"] in problem
        assert refuses(web)
    operator.wait_for("the port", lambda report: report.http_address == address)
    assert not operator.wait_for("no problem", lambda report: True).server_problems


CONNECT = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
host, port = sys.argv[1].rsplit(":", 1)
held = []
for number in range(int(sys.argv[2])):
    try:
        held.append(socket.create_connection(
            (host, int(port)), 1, source_address=(f"127.0.{number % 200}.{1 + number % 7}", 0)))
    except OSError:
        break
ready(len(held))
"""
"""Makes connections and holds them. Arguments: the address, and how many."""


def test_connections_that_a_user_holds_stop_no_agent(
    operator: AgentProcess, web: LabPod, lab: Lab
) -> None:
    report = start_enforcing(operator, web)
    descriptors = pathlib.Path(f"/proc/{operator.pid}/fd")
    before = len(os.listdir(descriptors))
    with unprivileged.running(CONNECT, report.http_address, "3000"):
        wait_until("few descriptors", lambda: len(os.listdir(descriptors)) < before + 100)
        # Root has places of its own.
        assert get(report.http_address, "/metrics").startswith(b"# HELP")
        late = lab.add_pod("late", 2)
        operator.write_manifest(late, mode="enforce", container={})
        operator.wait_for("a new pod's gate", isolated_as("late", "Enforced"))


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return bytes(answer.read())


def test_agent_without_a_free_descriptor_stays_and_gates_the_next_pod(
    operator: AgentProcess, web: LabPod, lab: Lab
) -> None:
    start_enforcing(operator, web)
    pid = operator.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        late = lab.add_pod("late", 2)
        operator.write_manifest(late, mode="enforce", container={})
        wait_until(
            "tasks without descriptors",
            lambda: len(operator.log_lines(Event.COMPONENT_FAILED)) > 3,
        )
        assert refuses(web)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    operator.wait_for("a new pod's gate", isolated_as("late", "Enforced"))
    assert operator.pid == pid


READ = """
found = []
for directory, _, files in os.walk(sys.argv[1]):
    for name in files:
        path = os.path.join(directory, name)
        try:
            os.close(os.open(path, os.O_RDONLY))
            found.append(path)
        except OSError:
            pass
ready(*found)
"""


def test_user_reads_no_file_of_the_run_directory(operator: AgentProcess, web: LabPod) -> None:
    """cni.json names every namespace of the cluster with its mode."""
    start_enforcing(operator, web)
    state = operator.run_directory / "cni.json"
    assert state.stat().st_mode & 0o777 == 0o600
    with unprivileged.running(READ, str(operator.run_directory)) as found:
        assert found == ""
    state.chmod(0o644)
    with unprivileged.running(READ, str(operator.run_directory)) as found:
        assert found == str(state)


def test_run_directory_of_another_user_is_one_sentence(operator: AgentProcess, web: LabPod) -> None:
    operator.run_directory.mkdir()
    os.chown(operator.run_directory, unprivileged.USER, unprivileged.USER)
    done = operator.run(
        *("run", *operator.pods_from, "--run-directory", str(operator.run_directory)),
        *("--bpffs", str(operator.bpffs)),
    )
    assert done.returncode == 1
    assert f"{operator.run_directory} belongs to user 65534" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def open_bpffs(own_node: None) -> Iterator[pathlib.Path]:
    """A BPF file system in which every user may make directories, the kernel's default."""
    with unprivileged.visible_directory() as directory:
        path = directory / "bpf"
        path.mkdir()
        namespaces.mount("bpf", path)
        try:
            yield path
        finally:
            namespaces.unmount(str(path))


SQUAT = """
directory = sys.argv[1]
os.umask(0)
os.makedirs(directory + "/v1/links", 0o777)
ready(os.stat(directory).st_uid)
"""

RACE = """
import threading
directory = sys.argv[1]
def make():
    while True:
        try:
            os.makedirs(directory + "/kept")
        except OSError:
            pass
threading.Thread(target=make, daemon=True).start()
ready(1)
"""

RENAME = """
try:
    os.rename(sys.argv[1] + "/" + sys.argv[2], sys.argv[1] + "/mine")
    ready("renamed")
except OSError as error:
    ready(error.strerror)
"""


@pytest.mark.parametrize("program", [SQUAT, RACE], ids=["made before", "made again and again"])
def test_directory_that_a_user_made_in_the_bpf_file_system_is_moved_aside(
    open_bpffs: pathlib.Path, program: str
) -> None:
    installation = pins.Pins(open_bpffs)
    with unprivileged.running(program, str(installation.root)):
        installation.prepare()
    status = installation.root.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
    assert list(installation.links.iterdir()) == []
    links = str(installation.schema.relative_to(open_bpffs)), "links"
    for path, name in (("", "podgate"), links):
        with unprivileged.running(RENAME, str(open_bpffs / path), name) as result:
            assert result in ("Operation not permitted", "Permission denied")


def test_link_that_a_user_made_in_the_bpf_file_system_is_not_followed(
    open_bpffs: pathlib.Path,
) -> None:
    installation = pins.Pins(open_bpffs)
    (open_bpffs / "elsewhere").mkdir()
    with unprivileged.running(
        "os.symlink(sys.argv[1] + '/elsewhere', sys.argv[1] + '/podgate'); ready(1)",
        str(open_bpffs),
    ):
        installation.prepare()
    assert not installation.root.is_symlink()
    assert list((open_bpffs / "elsewhere").iterdir()) == []


def test_directory_of_a_previous_version_is_closed_to_other_users(
    open_bpffs: pathlib.Path,
) -> None:
    installation = pins.Pins(open_bpffs)
    installation.root.mkdir(mode=0o755)
    installation.prepare()
    assert installation.root.stat().st_mode & 0o777 == 0o700

"""An agent of a younger pod takes the node over; the previous one stands by, and takes it back if
the younger one fails."""

import functools
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator

import pytest

import agent
from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, pod_of
from agent.logs import Event
from bpf import abi, pins, syscalls
from tests.kernel import attached, versions
from tests.kernel.secondagent import SecondAgent
from tests.kernel.test_attach import attacked
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

_ARRAY = 2  # BPF_MAP_TYPE_ARRAY


@pytest.fixture
def pod(lab: labs.Lab, operator: AgentProcess) -> labs.LabPod:
    made = lab.add_pod("web", 1)
    operator.write_manifest(made, mode="enforce", container={})
    return made


@pytest.fixture
def first(
    operator: AgentProcess, tmp_path: pathlib.Path, pod: labs.LabPod
) -> Iterator[SecondAgent]:
    """The agent of the older pod; it holds the node."""
    made = SecondAgent(operator, tmp_path / "first")
    made.start_standby()
    made.wait_for("the gate", _held_by(made))
    wait_until("it is ready", lambda: has_been_ready(made, times=1))
    yield made
    made.stop(signal.SIGKILL)


def _held_by(holder: AgentProcess) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        found = pod_of(report, "web")
        is_gated = found is not None and report.is_synced and bool(found.gates)
        return report.pid == holder.pid and is_gated

    return holds


def has_been_ready(holder: AgentProcess, *, times: int) -> bool:
    return len(list(holder.log_lines(Event.AGENT_READY))) == times


def take_over(first: SecondAgent, second: SecondAgent, *extra: str) -> None:
    second.start_standby(*extra)
    second.wait_for("the take-over", _held_by(second))
    wait_until("the second is ready", lambda: second.is_ready)


def test_agent_of_a_younger_pod_gets_the_node_from_the_previous_one(
    first: SecondAgent, second: SecondAgent, pod: labs.LabPod
) -> None:
    wait_until("the first is ready", lambda: first.is_ready)
    with attacked(pod):
        take_over(first, second)
    # Otherwise the DaemonSet controller would delete its pod before the second has proved itself.
    assert first.is_ready
    assert first.has_logged(Event.HANDED_OVER.message)
    assert second.has_logged(Event.STANDBY_TAKING_OVER.message)
    report = second.wait_for("the programs", lambda report: True)
    assert report.programs == "pinned"
    # As when the old pod is deleted.
    first.stop(signal.SIGTERM)
    second.wait_for("the second", _held_by(second))
    assert second.is_ready


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_previous_agent_resumes_when_the_next_one_ends(
    lab: labs.Lab,
    first: SecondAgent,
    second: SecondAgent,
    pod: labs.LabPod,
    operator: AgentProcess,
    end: signal.Signals,
) -> None:
    with attacked(pod):
        take_over(first, second)
        second.stop(end)
        first.wait_for("the first again", _held_by(first))
    wait_until("the first is ready", lambda: has_been_ready(first, times=2))
    assert_works(lab, operator, first)


def assert_works(lab: labs.Lab, operator: AgentProcess, holder: AgentProcess) -> None:
    """A pod that is created now is gated."""
    late = lab.add_pod("late", 2)
    with late.listen(80):
        operator.write_manifest(late, mode="enforce", container={})
        holder.wait_for("a new pod's gate", _has_gate("late"))
        observed = attempts.connect_from_node(late, "IPv4", 80, is_rejected=True)
        assert observed in (attempts.REFUSED, attempts.DROPPED)


def _has_gate(name: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        found = pod_of(report, name)
        return found is not None and bool(found.gates)

    return holds


# A file of the agent, what is in it, and what a broken version has there.
_SETTINGS = "        self._settings = settings\n"
_WAIT = "            await self._wait()\n"
BREAKS = {
    "crash before it serves": ("app/agent.py", _SETTINGS, "        1 / 0\n"),
    "crash of a task": ("app/reconciler.py", _WAIT, "            1 / 0\n"),
    "hang": ("app/reconciler.py", _WAIT, "            __import__('time').sleep(1000)\n"),
    "never ready": (
        "app/readiness.py",
        "problem = self._find_problem()",
        'problem = "it is broken"',
    ),
}


def broken_version(directory: pathlib.Path, how: str) -> pathlib.Path:
    """A copy of the agent that breaks once it holds the node. Returns its directory."""
    copy = versions.copy_of(agent, directory)
    file, before, after = BREAKS[how]
    replace(copy / file, before, after)
    replace(copy / "app/readiness.py", "_LIMIT_SECONDS = 60.0", "_LIMIT_SECONDS = 2.0")
    return directory


def replace(file: pathlib.Path, before: str, after: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1
    file.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.parametrize("how", BREAKS)
def test_version_that_breaks_at_the_take_over_is_never_ready_and_the_previous_one_resumes(
    lab: labs.Lab,
    first: SecondAgent,
    second: SecondAgent,
    pod: labs.LabPod,
    operator: AgentProcess,
    tmp_path: pathlib.Path,
    how: str,
) -> None:
    version = broken_version(tmp_path / "broken", how)
    with attacked(pod):
        second.start_standby("--watchdog-seconds", "4", version=version)
        assert second.wait() == 1
        assert not second.is_ready
        assert second.has_logged(Event.STANDBY_TAKING_OVER.message)
        first.wait_for("the first again", _held_by(first))
    wait_until("the first is ready", lambda: has_been_ready(first, times=2))
    assert_works(lab, operator, first)


def test_version_with_other_maps_that_breaks_gives_its_gates_back(
    lab: labs.Lab,
    first: SecondAgent,
    second: SecondAgent,
    pod: labs.LabPod,
    operator: AgentProcess,
    tmp_path: pathlib.Path,
) -> None:
    """It has replaced the gates before it is killed."""
    versions.of_schema(tmp_path / "next", abi.SCHEMA + 1)
    with attacked(pod):
        second.start_standby(version=tmp_path / "next")
        second.wait_for("the take-over", _held_by(second))
        second.stop(signal.SIGKILL)
        first.wait_for("the first again", _held_by(first))
    assert_works(lab, operator, first)


def test_gates_hold_when_both_agents_fail(
    first: SecondAgent, second: SecondAgent, pod: labs.LabPod, tmp_path: pathlib.Path
) -> None:
    version = broken_version(tmp_path / "broken", "crash of a task")
    with attacked(pod):
        os.kill(first.pid, signal.SIGSTOP)
        try:
            second.start_standby(version=version)
            wait_until("the request", lambda: second.has_logged(Event.HANDOVER_REJECTED.message))
        finally:
            os.kill(first.pid, signal.SIGKILL)
        assert second.wait() == 1


def test_restarted_container_of_the_previous_pod_does_not_get_the_node(
    first: SecondAgent, second: SecondAgent
) -> None:
    take_over(first, second)
    first.stop(signal.SIGKILL)
    first.start_standby()
    wait_until(
        "the rejection", lambda: "has a younger pod" in first.log.read_text(encoding="utf-8")
    )
    second.wait_for("the second", _held_by(second))
    assert second.is_ready
    assert not first.is_ready


def test_restarted_container_of_the_next_pod_gets_the_node_again(
    first: SecondAgent, second: SecondAgent
) -> None:
    take_over(first, second)
    second.stop(signal.SIGKILL)
    first.wait_for("the first again", _held_by(first))
    take_over(first, second)
    assert first.is_ready


def test_handovers_leave_no_descriptor(first: SecondAgent, second: SecondAgent) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{first.pid}/fd"))

    wait_until("the kernel compares memory", lambda: attached.compares_memory(first.pid))
    before = descriptors()
    for turn in range(3):
        take_over(first, second)
        second.stop(signal.SIGTERM)
        first.wait_for("the first again", _held_by(first))
        ready = functools.partial(has_been_ready, first, times=turn + 2)
        wait_until("the first is ready", ready)
        # The test's own requests end soon.
        wait_until("as many as before", lambda: descriptors() <= before)


def test_standby_agent_exits_on_sigterm(first: SecondAgent, second: SecondAgent) -> None:
    take_over(first, second)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 0
    second.wait_for("the second", _held_by(second))


def test_ready_file_of_a_killed_agent_is_removed_at_the_next_start(
    first: SecondAgent, second: SecondAgent
) -> None:
    take_over(first, second)
    (first.pod_directory / "ready").touch()
    first.stop(signal.SIGKILL)
    first.start_standby()
    wait_until("removal", lambda: not first.is_ready)


def test_standby_agent_exits_at_its_time_limit(first: SecondAgent, second: SecondAgent) -> None:
    take_over(first, second)
    first.stop(signal.SIGKILL)
    first.start_standby(seconds=0.2)
    assert first.wait() == 1
    assert "another agent is running" in first.log.read_text()
    second.wait_for("the second", _held_by(second))


def test_agent_that_cannot_load_its_programs_requests_nothing(
    first: SecondAgent, second: SecondAgent, installed_pins: pins.Pins
) -> None:
    shutil.rmtree(next(installed_pins.programs.iterdir()))
    gates = installed_pins.maps / "gates"
    gates.unlink()
    other = syscalls.map_create(_ARRAY, 4, 4, 1)
    syscalls.pin(other, str(gates))
    os.close(other)
    second.start_standby()
    assert second.wait() == 1
    assert "gates" in second.log.read_text()
    assert not first.has_logged(Event.HANDED_OVER.message)
    first.wait_for("the first", _held_by(first))


def test_directory_that_cannot_be_written_is_one_sentence(
    operator: AgentProcess, pod: labs.LabPod, tmp_path: pathlib.Path
) -> None:
    done = operator.run(
        *("run", *operator.pods_from, "--pod-directory", str(tmp_path / "nosuch")),
        *("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs)),
    )
    assert done.returncode == 1
    assert "nosuch" in done.stderr
    assert "--pod-directory" in done.stderr
    assert done.stderr.count("\n") == 1

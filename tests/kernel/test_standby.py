"""A standby agent is prepared, waits until the first agent exits, and then takes over."""

import os
import shutil
import signal

import pytest

from agent.admin.report import AgentReport
from agent.lab import agent_process
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, pod_of
from agent.logs import Event
from bpf import pins, syscalls
from tests.kernel.secondagent import SecondAgent

pytestmark = pytest.mark.kernel

_ARRAY = 2  # BPF_MAP_TYPE_ARRAY


@pytest.fixture
def pod(lab: labs.Lab, operator: AgentProcess) -> labs.LabPod:
    made = lab.add_pod("web", 1)
    operator.write_manifest(made, mode="enforce", container={})
    return made


def _is_gated(report: AgentReport) -> bool:
    found = pod_of(report, "web")
    return found is not None and report.is_synced and bool(found.gates)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_the_second_agent_takes_over_when_the_first_ends(
    operator: AgentProcess, second: SecondAgent, pod: labs.LabPod, end: signal.Signals
) -> None:
    operator.start()
    first = operator.wait_for("the gate", _is_gated)
    second.start_standby()
    agent_process.wait_until("the second agent stands by", second.started_file.exists)
    # Still the first one's node.
    assert operator.wait_for("the first", lambda report: True).pid == first.pid

    operator.stop(end)
    report = second.wait_for("the take-over", _is_gated)
    assert report.pid == second.pid
    assert report.programs == "pinned"
    assert second.has_logged(Event.STANDBY_TAKING_OVER.message)


def test_standby_agent_exits_on_sigterm(
    operator: AgentProcess, second: SecondAgent, pod: labs.LabPod
) -> None:
    operator.start()
    operator.wait_for("the gate", _is_gated)
    second.start_standby()
    agent_process.wait_until("the second agent stands by", second.started_file.exists)
    second.stop(signal.SIGTERM)
    assert not second.has_logged(Event.STANDBY_TAKING_OVER.message)
    operator.wait_for("the first", _is_gated)


def test_standby_agent_exits_at_its_time_limit(
    operator: AgentProcess, second: SecondAgent, pod: labs.LabPod
) -> None:
    operator.start()
    operator.wait_for("the gate", _is_gated)
    second.start_standby(seconds=0.2)
    assert second.wait() == 1
    assert "another agent is running" in second.log.read_text()


def test_standby_agent_that_cannot_take_over_reports_no_start(
    operator: AgentProcess, second: SecondAgent, pod: labs.LabPod, fresh_pins: pins.Pins
) -> None:
    operator.start()
    operator.wait_for("the gate", _is_gated)
    shutil.rmtree(next(fresh_pins.programs.iterdir()))
    gates = fresh_pins.maps / "gates"
    gates.unlink()
    other = syscalls.map_create(_ARRAY, 4, 4, 1)
    syscalls.pin(other, str(gates))
    os.close(other)
    second.start_standby()
    assert second.wait() == 1
    assert "gates" in second.log.read_text()
    assert not second.started_file.exists()

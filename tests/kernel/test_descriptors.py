"""An agent without a free descriptor: its gates stay, and it works again when there are some."""

import resource
import time

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab
from agent.logs import Event
from agent.pods.conditions import TRUE

pytestmark = pytest.mark.kernel

PORT = 8080
LISTENING = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
# Longer than the heartbeat's period and the default-deny table's two seconds.
EXHAUSTED_SECONDS = 6.0


def test_agent_without_descriptors_keeps_its_gates_and_recovers(
    operator: AgentProcess, lab: Lab
) -> None:
    web = lab.add_pod("web", 1)
    with web.listen(PORT):
        operator.write_manifest(web, mode="enforce", container=LISTENING)
        operator.start("--mode", "enforce")
        operator.wait_for("the gate", lambda report: is_isolated(report, "web"))
        limits = resource.prlimit(operator.pid, resource.RLIMIT_NOFILE)
        # All numbers below it are in use.
        resource.prlimit(operator.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
        ends = time.monotonic() + EXHAUSTED_SECONDS
        while time.monotonic() < ends:
            assert attempts.connect_from_node(web, "IPv4", PORT, is_rejected=True) in (
                attempts.REFUSED,
                attempts.DROPPED,
            )
        resource.prlimit(operator.pid, resource.RLIMIT_NOFILE, limits)
        operator.event(Event.COMPONENT_FAILED)
        later = lab.add_pod("later", 2)
        operator.write_manifest(later, mode="enforce", container=LISTENING)
        operator.wait_for("the later gate", lambda report: is_isolated(report, "later"))


def is_isolated(report: AgentReport, name: str) -> bool:
    condition = condition_of(report, name, labels.ISOLATION_READY)
    return condition is not None and condition.status == TRUE

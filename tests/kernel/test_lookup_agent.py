"""An agent decides tcp probes by lookups, and sees what changes in the pod beside its listeners."""

import socket
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.report import AgentReport, ProbeStatus
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from tests import redirected
from tests.kernel import offers

pytestmark = pytest.mark.kernel

PORT = 8080
PROBE = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 1}}
DROP = """
table inet own {
  chain out {
    type filter hook output priority 0
    tcp dport 8080 drop
  }
}
"""


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    """With a server at its IPv4 address."""
    made = lab.add_pod("web", 1)
    with made.listen(PORT, socket.AF_INET):
        yield made


def start(operator: AgentProcess, pod: LabPod) -> None:
    """No connection in the rhythm, so each one has a reason."""
    offers.need_listener_lookups()
    operator.write_manifest(pod, mode="enforce", container=PROBE)
    operator.start("--probe-connect-every", "1000")


def probe_of(report: AgentReport) -> ProbeStatus | None:
    found = pod_of(report, "web")
    return found.probes[0] if found and found.probes else None


def is_looked_up(report: AgentReport) -> bool:
    probe = probe_of(report)
    return probe is not None and probe.is_looked_up


def has_reason(reason: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = condition_of(report, "web", labels.PROBES_PASSING)
        return condition is not None and condition.reason == reason

    return holds


def test_lookups_count_as_probes(operator: AgentProcess, pod: LabPod) -> None:
    start(operator, pod)
    first = probe_of(operator.wait_for("a lookup", is_looked_up))
    assert first is not None

    def has_more(report: AgentReport) -> bool:
        probe = probe_of(report)
        return probe is not None and probe.successes >= first.successes + 2

    probe = probe_of(operator.wait_for("more successes", has_more))
    assert probe is not None
    assert (probe.result, probe.failures, probe.families) == ("success", 0, ["IPv4"])
    assert len(probe.recent_ms) == probe.successes


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        ("ip link set lo down", "ip link set lo up"),
        ("ip address del 198.18.1.1/32 dev eth0", "ip address add 198.18.1.1/32 dev eth0"),
    ],
    ids=["loopback down", "address removed"],
)
def test_a_lost_way_to_the_listener_fails(
    operator: AgentProcess, pod: LabPod, change: str, undo: str
) -> None:
    start(operator, pod)
    operator.wait_for("a lookup", is_looked_up)
    redirected.run(pod.netns, *change.split())
    operator.wait_for("the failure", has_reason("ProbeFailing"))
    redirected.run(pod.netns, *undo.split())
    operator.wait_for("the success", has_reason("ProbesPassing"))


def test_connections_that_fail_beside_a_listener_with_room_are_a_finding(
    operator: AgentProcess, pod: LabPod
) -> None:
    start(operator, pod)
    operator.wait_for("a lookup", is_looked_up)
    redirected.nft(pod.netns, DROP)
    operator.wait_for("the failure", has_reason("ProbeFailing"))

    def is_found(report: AgentReport) -> bool:
        return any(one.kind == kinds.PROBE_LOOKUPS_DIFFER.name for one in report.findings)

    report = operator.wait_for("the finding", is_found)
    (found,) = (one for one in report.findings if one.kind == kinds.PROBE_LOOKUPS_DIFFER.name)
    assert found.subject == "pod demo/web"
    assert "probes app Readiness" in found.sentence
    redirected.nft(pod.netns, "delete table inet own")
    report = operator.wait_for("the success", has_reason("ProbesPassing"))
    assert not is_looked_up(report)

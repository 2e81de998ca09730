"""Pods whose own rules redirect connections to a mesh's proxy: strict, and results of probes."""

import subprocess
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from tests import redirected
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_relay_conditions import RANGES, dial
from tests.kernel.test_relay_way import is_strict, isolation
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

PORT = 8080
PROBE = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    """A pod with a proxy, and without rules."""
    made = lab.add_pod("web", 1)
    with redirected.proxy(made.netns):
        yield made


def start(operator: AgentProcess, pod: LabPod, kubelet: Cgroup, *, mode: str = "strict") -> None:
    operator.write_manifest(pod, mode=mode, container=PROBE)
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)


def dials(kubelet: Cgroup, pod: LabPod) -> list[str]:
    return [dial(kubelet, address) for address in (pod.ipv4, pod.ipv6)]


def is_left_at_enforce(report: AgentReport) -> bool:
    reason, message = isolation(report)
    why = "redirected to port 15001 (a mesh with Envoy, user 5995), so the relay cannot reach"
    return reason == "Enforced" and why in message


def strict_problem(report: AgentReport) -> str:
    found = pod_of(report, "web")
    return found.strict_problem if found else ""


def test_relay_reaches_the_application_behind_rules_that_exempt_the_proxys_user(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None
) -> None:
    """Else the kubelet's tcp probe of a dead application always succeeds."""
    redirected.nft(pod.netns, redirected.CONSUL)
    start(operator, pod, kubelet)
    operator.wait_for("strict", is_strict)
    assert dials(kubelet, pod) == [REFUSED, REFUSED]
    with pod.listen(PORT):
        assert dials(kubelet, pod) == [pod.ipv4, pod.ipv6]
    assert dials(kubelet, pod) == [REFUSED, REFUSED]


def test_pod_whose_rules_redirect_every_user_stays_at_enforce(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None
) -> None:
    redirected.nft(pod.netns, redirected.EXEMPTS_NOBODY)
    start(operator, pod, kubelet)
    operator.wait_for("enforce", is_left_at_enforce)
    # From outside, as without podgate: these rules have no part for that.
    assert dials(kubelet, pod) == [REFUSED, REFUSED]
    redirected.nft(pod.netns, "delete table inet mesh")
    operator.wait_for("strict", is_strict)
    assert dials(kubelet, pod) == [REFUSED, REFUSED]


def test_pod_whose_rules_redirect_a_probed_port_alone_stays_at_enforce(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None
) -> None:
    """A connection to an unused port finds no such rule, but the port's own probe."""
    redirected.nft(pod.netns, redirected.one_port(PORT))
    start(operator, pod, kubelet)
    operator.wait_for("enforce", is_left_at_enforce)
    # The relay served the pod until the first probe; the condition changes before the relay stops.
    wait_until("the pod without the relay", lambda: dials(kubelet, pod) == [REFUSED, REFUSED])
    redirected.nft(pod.netns, "delete table inet mesh")
    exemption = f"meta skuid {redirected.USER} return"
    redirected.nft(pod.netns, redirected.one_port(PORT, exemption))
    operator.wait_for("strict", is_strict)
    wait_until("the relay's answer", lambda: dials(kubelet, pod) == [REFUSED, REFUSED])


def test_rules_of_an_init_container_are_found_in_a_pod_in_strict(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None
) -> None:
    start(operator, pod, kubelet)
    operator.wait_for("strict", is_strict)
    redirected.nft(pod.netns, redirected.CONSUL)
    line = operator.event(Event.POD_REDIRECTED, pod="demo/web")
    assert (line["port"], line["exempt_user"]) == (redirected.PROXY, redirected.USER)
    wait_until("the relay's answer", lambda: dials(kubelet, pod) == [REFUSED, REFUSED])
    redirected.nft(pod.netns, "delete table inet mesh")
    redirected.nft(pod.netns, redirected.EXEMPTS_NOBODY)
    operator.wait_for("enforce", is_left_at_enforce)


def test_probe_that_is_redirected_is_reported_and_decides_nothing(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    redirected.nft(pod.netns, redirected.EXEMPTS_NOBODY)
    start(operator, pod, kubelet, mode="enforce")

    def is_reported(report: AgentReport) -> bool:
        condition = condition_of(report, "web", labels.PROBES_PASSING)
        return condition is not None and condition.reason == "ProbeRedirected"

    report = operator.wait_for("the condition", is_reported)
    found = pod_of(report, "web")
    assert found is not None
    (probe,) = found.probes
    assert (probe.result, probe.failures, probe.is_redirected) == ("unknown", 0, True)
    sentences = [one.sentence for one in report.findings if one.kind == kinds.PROBE_REDIRECTED.name]
    assert sentences == [
        "No result of app Readiness: redirected to port 15001 (a mesh with Envoy, user 5995), "
        "which shows nothing of the application."
    ]
    # Before a step to strict it shows that this pod will stay at enforce.
    report = operator.wait_for("what strict would be", lambda r: bool(strict_problem(r)))
    assert "are redirected to port 15001" in strict_problem(report)
    redirected.nft(pod.netns, "delete table inet mesh")
    with pod.listen(PORT):

        def passes(report: AgentReport) -> bool:
            condition = condition_of(report, "web", labels.PROBES_PASSING)
            return condition is not None and condition.reason == "ProbesPassing"

        operator.wait_for("the application's result", passes)


FIREWALLS = {
    # An egress lock-down: replies pass, new connections do not.
    "output": "table inet fw { chain o { type filter hook output priority 0; policy drop;\n"
    "ct state established,related accept\nmeta l4proto ipv6-icmp accept\n}\n}\n",
    # Clients come by eth0.
    "input": "table inet fw { chain i { type filter hook input priority 0; policy accept;\n"
    "iifname lo drop\n}\n}\n",
}


@pytest.mark.parametrize("firewall", FIREWALLS.values(), ids=FIREWALLS)
def test_pod_whose_firewall_drops_connections_from_inside_stays_at_enforce(
    operator: AgentProcess, lab: Lab, kubelet: Cgroup, no_relays: None, firewall: str
) -> None:
    """The kubelet reaches it from outside; by the relay, each probe would time out."""
    pod = lab.add_pod("web", 1)
    inside = ["nsenter", f"--net={pod.netns.path}", "nft"]
    with pod.listen(PORT) as listener:
        listener.listen(4096)  # nothing accepts
        subprocess.run([*inside, "-f", "-"], input=firewall, text=True, check=True)
        start(operator, pod, kubelet)
        report = operator.wait_for(
            "the firewall is found", lambda found: "rules in the pod (port" in isolation(found)[1]
        )
        assert isolation(report)[0] == "Enforced"
        assert "are dropped by rules in the pod (port 8080), so" in isolation(report)[1]
        assert dials(kubelet, pod) == [pod.ipv4, pod.ipv6]
        subprocess.run([*inside, "delete", "table", "inet", "fw"], check=True)
        operator.wait_for("strict", is_strict)
        assert dials(kubelet, pod) == [pod.ipv4, pod.ipv6]
        subprocess.run([*inside, "-f", "-"], input=firewall, text=True, check=True)
        operator.wait_for("enforce again", lambda found: isolation(found)[0] == "Enforced")
        wait_until("the pod without the relay", lambda: dials(kubelet, pod) == [pod.ipv4, pod.ipv6])

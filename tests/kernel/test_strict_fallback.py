"""What the kubelet reaches past the relay, with a real agent: nothing while a relay serves, and
what enforce admits as soon as none does, unless `--strict-without-fallback`.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import TRUE
from tests.kernel import cgroups, offers, traffic
from tests.kernel.cgroups import Cgroup
from tests.polling import wait_until
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

RANGES = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")
ENDS_WITH_AGENT = ("--orphan-relay-seconds", "0")
PORT = 8080
PROBE = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 3600}}

# Connects once, by a socket bound to this interface if it is named.
DIAL = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.settimeout(float(sys.argv[4]))
if sys.argv[3]:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[3].encode())
print(sock.connect_ex((sys.argv[1], int(sys.argv[2]))))
"""


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(PORT):
        yield made


def start(operator: AgentProcess, kubelet: Cgroup, *extra: str) -> None:
    """Start the agent, and wait until the pod is in strict and served by a relay."""
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES, *extra)
    operator.wait_for("a relay", lambda report: is_strict(report) and report.relay.is_up)


def is_strict(report: AgentReport, why: str = "") -> bool:
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    return (
        condition is not None
        and (condition.status, condition.reason) == (TRUE, "Strict")
        and condition.message.endswith(why)
    )


def relay_pid(operator: AgentProcess) -> int:
    return int(list(operator.log_lines(Event.RELAY_STARTED))[-1]["pid"])


def connects(kubelet: Cgroup, pod: LabPod, *, bound: bool = False) -> bool:
    """Whether the kubelet's connects succeed, over both families. bound: to the pod's interface,
    which no relay proxies."""
    return results(kubelet, pod, bound, traffic.LIMIT_SECONDS) == {True}


def fails(kubelet: Cgroup, pod: LabPod, *, bound: bool = False) -> bool:
    """Whether the kubelet's connects get no answer to one SYN, over both families."""
    return results(kubelet, pod, bound, traffic.DROPPED_AFTER_SECONDS) == {False}


def results(kubelet: Cgroup, pod: LabPod, bound: bool, seconds: float) -> set[bool]:
    interface = pod.interface if bound else ""
    found = set()
    for address in (pod.ipv4, pod.ipv6):
        command = [*BARE_PYTHON, "-c", DIAL, address, str(PORT), interface, str(seconds)]
        found.add(int(kubelet.run(command).stdout) == 0)
    return found


def dropped(operator: AgentProcess) -> int:
    """Packets that the pod's gates dropped because they bypassed the relay."""
    report = operator.report()
    assert report is not None
    found = pod_of(report, "web")
    assert found is not None
    return sum(gate.packets.get("drop", {}).get("strict", 0) for gate in found.gates)


def test_kubelet_gets_past_the_relay_only_until_another_one_serves(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    assert connects(kubelet, pod)
    assert dropped(operator) == 0
    assert fails(kubelet, pod, bound=True)
    assert dropped(operator) >= 2

    killed = relay_pid(operator)
    os.kill(killed, signal.SIGKILL)
    assert connects(kubelet, pod)
    wait_until("another relay", lambda: relay_pid(operator) != killed)
    operator.wait_for("strict again", lambda report: is_strict(report) and report.relay.is_up)
    assert connects(kubelet, pod)
    assert fails(kubelet, pod, bound=True)


def test_when_relay_and_agent_hang_the_kubelet_is_admitted_as_in_enforce(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    assert fails(kubelet, pod, bound=True)
    relay = relay_pid(operator)
    with contextlib.ExitStack() as stack:
        for pid in (operator.pid, relay):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        wait_until("fallback", lambda: connects(kubelet, pod, bound=True))
        assert connects(kubelet, pod)
    operator.wait_for("strict again", lambda report: is_strict(report) and report.relay.is_up)
    wait_until("the gate closed", lambda: fails(kubelet, pod, bound=True))


def test_when_the_relay_ends_with_its_agent_the_kubelet_is_admitted_as_in_enforce(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet, *ENDS_WITH_AGENT)
    operator.stop(signal.SIGKILL)
    assert connects(kubelet, pod)
    wait_until("fallback", lambda: connects(kubelet, pod, bound=True))
    start(operator, kubelet)
    assert connects(kubelet, pod)
    assert fails(kubelet, pod, bound=True)


def test_without_fallback_the_kubelet_waits_for_a_relay(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    """With the agent dead, too; an agent without the option admits it again."""
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet, "--strict-without-fallback", *ENDS_WITH_AGENT)
    assert connects(kubelet, pod)
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    operator.wait_for("its first result", lambda report: not report.findings)
    assert "all pods synced, strict without fallback" in operator.run("doctor", *where).stdout
    operator.stop(signal.SIGKILL)
    wait_until("probes fail", lambda: fails(kubelet, pod))
    start(operator, kubelet, "--strict-without-fallback")
    assert connects(kubelet, pod)

    operator.stop(signal.SIGKILL)
    assert connects(kubelet, pod)
    start(operator, kubelet, *ENDS_WITH_AGENT)
    operator.stop(signal.SIGKILL)
    wait_until("fallback", lambda: connects(kubelet, pod, bound=True))


def test_without_fallback_a_pod_whose_relay_is_off_reports_why_its_probes_fail(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    metadata = {
        "name": pod.name,
        "namespace": "demo",
        "labels": {labels.MODE_LABEL: "strict"},
        "annotations": {
            labels.NETNS_ANNOTATION: pod.netns.path,
            labels.RELAY_ANNOTATION: "off",
        },
    }
    spec = {"containers": [{"name": "app", "image": "none", **PROBE}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    operator.write_file("web.yaml", json.dumps(manifest))
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES, "--strict-without-fallback")
    why = (
        "The kubelet's probes fail (--strict-without-fallback): Annotation podgate.io/relay is "
        '"off".'
    )
    operator.wait_for("the reason", lambda report: is_strict(report, why))
    assert fails(kubelet, pod)

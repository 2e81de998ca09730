"""A pod with more addresses than a gate lists is gated at all of them, and loses none."""

import ipaddress
import socket
import subprocess
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab, LabPod
from bpf import abi
from tests.kernel import cgroups, enforcing, traffic
from tests.kernel.cgroups import Cgroup
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
LAYOUTS = pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
TOO_MANY = abi.GATE_ADDRESSES + abi.MAX_GATE_ADDRESSES + 50
PORT = 9000
DECLARED = {"readinessProbe": {"tcpSocket": {"port": PORT}}}
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)"


@pytest.fixture
def kubelet(operator: AgentProcess) -> Iterator[Cgroup]:
    """The cgroup that the agent takes for the kubelet's."""
    with cgroups.cgroup() as made:
        operator.kubelet = ("--kubelet", f"cgroup:{made.path}")
        yield made


def start_enforcing(operator: AgentProcess, pod: LabPod, kubelet: Cgroup) -> AgentReport:
    """Start an agent, or change the mode under the one that runs; its report once it enforces."""
    operator.write_manifest(pod, mode=enforcing.MODE.label, container=DECLARED)
    if not operator.is_running:
        operator.start(*enforcing.AGENT_OPTIONS)
    return operator.wait_for(
        "the gate", lambda report: bool(message_of(report)) and report.kubelet == kubelet.path
    )


def assert_gated_at(address: str, kubelet: Cgroup) -> None:
    """The gate drops what the host sends to the address, and does not take it for a stray: then
    the kubelet's connections to a declared port would be dropped, too.
    """
    assert traffic.is_dropped(address, PORT)
    done = kubelet.run([*BARE_PYTHON, "-c", CONNECT, address, str(PORT)])
    assert done.returncode == 0, (address, done.stderr)


def add_addresses(pod: LabPod, version: int, count: int) -> str:
    """Give the pod addresses that the host routes to it, as router advertisements do. The last."""
    network = ipaddress.ip_network("198.19.0.0/20" if version == 4 else "fd00:18:0:77::/64")
    flags = "" if version == 4 else " nodad"
    added = [network.network_address + number for number in range(1, count + 1)]
    lines = [f"address add {address}/{network.max_prefixlen} dev eth0{flags}" for address in added]
    command = ["nsenter", f"--net={pod.netns.path}", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    via = f"via {traffic.address(pod, version)} " if pod.is_bridged else ""
    device = f"dev {'' if pod.is_bridged else pod.interface}"
    subprocess.run(["ip", "route", "add", str(network), *(via or device).split()], check=True)
    return str(added[-1])


def message_of(report: AgentReport) -> str:
    """The condition's message once the pod's gate enforces."""
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    return condition.message if condition and condition.reason == enforcing.REASON else ""


@LAYOUTS
@VERSIONS
@pytest.mark.parametrize("count", [17, TOO_MANY])
def test_new_pod_is_gated_at_each_of_its_addresses(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab, version: int, is_bridged: bool, count: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    last = add_addresses(pod, version, count)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        report = start_enforcing(operator, pod, kubelet)
        assert_gated_at(last, kubelet)
        assert_gated_at(traffic.address(pod, version), kubelet)
    if count == TOO_MANY:
        assert "addresses, more than a gate lists" in message_of(report)


@VERSIONS
def test_audit_pod_with_many_addresses_is_closed_when_it_enforces(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="audit", container=DECLARED)
    operator.start(*enforcing.AGENT_OPTIONS)
    operator.wait_for("the gate", lambda r: any(one.gates for one in r.pods))
    last = add_addresses(pod, version, 17)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        start_enforcing(operator, pod, kubelet)
        assert_gated_at(last, kubelet)


@VERSIONS
def test_connections_from_the_last_of_many_addresses_work(
    operator: AgentProcess, lab: Lab, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    last = add_addresses(pod, version, 40)
    operator.write_manifest(pod, mode=enforcing.MODE.label, container={})
    operator.start(*enforcing.AGENT_OPTIONS)
    operator.wait_for("the gate", lambda report: bool(message_of(report)))
    family = traffic.family(version)
    with (
        traffic.listen_on_node(PORT) as server,
        pod.open_socket(family, socket.SOCK_STREAM) as client,
    ):
        client.settimeout(traffic.LIMIT_SECONDS)
        client.bind((last, 0))
        client.connect((traffic.NODE[version], PORT))
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"hello")
            assert client.recv(5) == b"hello"

"""A pod with more addresses than a gate lists is gated at all of them, and loses none."""

import contextlib
import ipaddress
import itertools
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
        "the gate",
        lambda report: bool(message_of(report, pod)) and report.kubelet == kubelet.path,
    )


def assert_gated_at(address: str, kubelet: Cgroup) -> None:
    """The gate drops what the host sends to the address, and does not take it for a stray: then
    the kubelet's connections to a declared port would be dropped, too.
    """
    assert traffic.is_dropped(address, PORT)
    done = kubelet.run([*BARE_PYTHON, "-c", CONNECT, address, str(PORT)])
    assert done.returncode == 0, (address, done.stderr)


def add_addresses(pod: LabPod, version: int, count: int, number: int = 0) -> str:
    """Give the pod addresses that the host routes to it, as router advertisements do. The last.

    number: of their network, from 0 to 7.
    """
    network = ipaddress.ip_network(
        f"198.19.{16 * number}.0/20" if version == 4 else f"fd00:18:0:{77 + number}::/64"
    )
    flags = "" if version == 4 else " nodad"
    added = [network.network_address + number for number in range(1, count + 1)]
    lines = [f"address add {address}/{network.max_prefixlen} dev eth0{flags}" for address in added]
    command = ["nsenter", f"--net={pod.netns.path}", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    via = f"via {traffic.address(pod, version)} " if pod.is_bridged else ""
    device = f"dev {'' if pod.is_bridged else pod.interface}"
    subprocess.run(["ip", "route", "add", str(network), *(via or device).split()], check=True)
    return str(added[-1])


def message_of(report: AgentReport, pod: LabPod) -> str:
    """The condition's message once the pod's gate enforces."""
    condition = condition_of(report, pod.name, labels.ISOLATION_READY)
    return condition.message if condition and condition.reason == enforcing.REASON else ""


def test_new_pods_are_gated_at_each_of_their_addresses(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab
) -> None:
    """Routed and bridged, over IPv4 or IPv6, with many addresses, or more than a gate lists."""
    cases = list(itertools.product([False, True], [4, 6], [17, TOO_MANY]))
    with contextlib.ExitStack() as servers:
        lasts: dict[LabPod, str] = {}
        for number, (is_bridged, version, count) in enumerate(cases):
            pod = lab.add_pod(f"web{number}", number + 1, bridged=is_bridged)
            lasts[pod] = add_addresses(pod, version, count, number)
            servers.enter_context(pod.listen(PORT))
            assert traffic.is_reached(lasts[pod], PORT)
            operator.write_manifest(pod, mode=enforcing.MODE.label, container=DECLARED)
        for pod, (_, version, count) in zip(lasts, cases, strict=True):
            report = start_enforcing(operator, pod, kubelet)
            assert_gated_at(lasts[pod], kubelet)
            assert_gated_at(traffic.address(pod, version), kubelet)
            is_too_many = "addresses, more than a gate lists" in message_of(report, pod)
            assert is_too_many is (count == TOO_MANY)


def test_audit_pod_with_many_addresses_is_closed_when_it_enforces(
    operator: AgentProcess, kubelet: Cgroup, lab: Lab
) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="audit", container=DECLARED)
    operator.start(*enforcing.AGENT_OPTIONS)
    operator.wait_for("the gate", lambda r: any(one.gates for one in r.pods))
    lasts = [add_addresses(pod, version, 17) for version in (4, 6)]
    with pod.listen(PORT):
        for last in lasts:
            assert traffic.is_reached(last, PORT)
        start_enforcing(operator, pod, kubelet)
        for last in lasts:
            assert_gated_at(last, kubelet)


def test_connections_from_the_last_of_many_addresses_work(operator: AgentProcess, lab: Lab) -> None:
    pod = lab.add_pod("web", 1)
    lasts = {version: add_addresses(pod, version, 40) for version in (4, 6)}
    operator.write_manifest(pod, mode=enforcing.MODE.label, container={})
    operator.start(*enforcing.AGENT_OPTIONS)
    operator.wait_for("the gate", lambda report: bool(message_of(report, pod)))
    with traffic.listen_on_node(PORT) as server:
        for version, last in lasts.items():
            with pod.open_socket(traffic.family(version), socket.SOCK_STREAM) as client:
                client.settimeout(traffic.LIMIT_SECONDS)
                client.bind((last, 0))
                client.connect((traffic.NODE[version], PORT))
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"hello")
                    assert client.recv(5) == b"hello"

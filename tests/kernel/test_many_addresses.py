"""A pod with more addresses than a gate lists is gated at all of them, and loses none."""

import ipaddress
import socket
import subprocess

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab, LabPod
from bpf import abi
from tests.kernel import traffic

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
LAYOUTS = pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
TOO_MANY = abi.GATE_ADDRESSES + abi.MAX_GATE_ADDRESSES + 50
PORT = 9000


def add_addresses(pod: LabPod, version: int, count: int) -> str:
    """Give the pod addresses that the host routes to it, as router advertisements do. The last."""
    first = ipaddress.ip_address("198.19.0.1" if version == 4 else "fd00:18:0:77::1")
    flags, length = ("", 32) if version == 4 else (" nodad", 128)
    added = [first + number for number in range(count)]
    lines = [f"address add {address}/{length} dev eth0{flags}" for address in added]
    command = ["nsenter", f"--net={pod.netns.path}", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    via = f"via {traffic.address(pod, version)} " if pod.is_bridged else ""
    device = f"dev {'' if pod.is_bridged else pod.interface}"
    route = f"route add {added[-1]}/{length} {via or device}"
    subprocess.run(["ip", *route.split()], check=True)
    return str(added[-1])


def message_of(report: AgentReport) -> str:
    """The condition's message once the pod's gate enforces."""
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    return condition.message if condition and condition.reason == "Enforced" else ""


@LAYOUTS
@VERSIONS
@pytest.mark.parametrize("count", [17, TOO_MANY])
def test_new_pod_is_gated_at_each_of_its_addresses(
    operator: AgentProcess, lab: Lab, version: int, is_bridged: bool, count: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    last = add_addresses(pod, version, count)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        operator.write_manifest(pod, mode="enforce", container={})
        operator.start()
        operator.wait_for("the gate", lambda report: bool(message_of(report)))
        assert traffic.is_dropped(last, PORT)
        assert traffic.is_dropped(traffic.address(pod, version), PORT)
        report = (
            operator.wait_for("the cause", lambda r: bool(message_of(r)))
            if count == TOO_MANY
            else None
        )
    if report:
        assert "addresses, more than a gate lists" in message_of(report)


@VERSIONS
def test_audit_pod_with_many_addresses_is_closed_when_it_enforces(
    operator: AgentProcess, lab: Lab, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="audit", container={})
    operator.start()
    operator.wait_for("the gate", lambda r: any(one.gates for one in r.pods))
    last = add_addresses(pod, version, 17)
    with pod.listen(PORT):
        assert traffic.is_reached(last, PORT)
        operator.write_manifest(pod, mode="enforce", container={})
        operator.wait_for("the mode", lambda report: bool(message_of(report)))
        assert traffic.is_dropped(last, PORT)


@VERSIONS
def test_connections_from_the_last_of_many_addresses_work(
    operator: AgentProcess, lab: Lab, version: int
) -> None:
    pod = lab.add_pod("web", 1)
    last = add_addresses(pod, version, 40)
    operator.write_manifest(pod, mode="enforce", container={})
    operator.start()
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

"""Pods connect to the host behind gates that enforce: no packet is lost."""

import socket
import subprocess

import pytest

from agent.lab import lab as labs
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import conversations, links, traffic
from tests.kernel.conversations import TCP_PORT, UDP_PORT
from tests.kernel.counting import Counting
from tests.kernel.guarded import CONTROL

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
FAMILY = {4: "ip", 6: "ip6"}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
ANSWERS = {(Verdict.PASS, Reason.ESTABLISHED), (Verdict.PASS, Reason.REPLY), *CONTROL}


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def pod(request: pytest.FixtureRequest, lab: labs.Lab) -> labs.LabPod:
    made = lab.add_pod("client", 1, bridged=request.param)
    wait_until_it_is_up(made)
    return made


def wait_until_it_is_up(pod: labs.LabPod) -> None:
    """A port of a bridge takes a moment, in which all is lost; a SYN is sent again."""
    with traffic.listen_on_node(TCP_PORT) as listening:
        traffic.pod_connects(pod, traffic.NODE[4], 4, listening)


def enforce(gates: Gates, pod: labs.LabPod) -> Counting:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    gates.start_reply_table(pod.ifindex)
    return Counting(gates, pod.ifindex)


@VERSIONS
def test_pod_talks_to_the_node(gates: Gates, pod: labs.LabPod, version: int) -> None:
    counting = enforce(gates, pod)
    node = gateway_of(pod, version)
    with conversations.served_by() as serving:
        conversations.exchange_all(pod, serving, node)
    moved = counting.moved()
    assert moved[Verdict.PASS, Reason.ESTABLISHED] > 1
    assert moved[Verdict.PASS, Reason.REPLY] >= 3
    assert moved.keys() <= ANSWERS


def gateway_of(pod: labs.LabPod, version: int) -> str:
    """The node's address that its answers to the pod come from."""
    if not pod.is_bridged:
        return traffic.NODE[version]
    return "198.18.2.1" if version == 4 else "fd00:18:0:2::1"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
@VERSIONS
def test_pod_gets_an_error_at_once_from_an_unused_host_port(
    gates: Gates, pod: labs.LabPod, version: int, kind: socket.SocketKind
) -> None:
    enforce(gates, pod)
    with (
        pod.open_socket(traffic.family(version), kind) as sock,
        pytest.raises(ConnectionRefusedError),
    ):
        conversations.request(sock, gateway_of(pod, version), 9)


@VERSIONS
def test_pod_talks_to_the_node_by_a_service_s_address(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    """As NodeLocal DNSCache is reached: the answers bear the service's address."""
    counting = enforce(gates, pod)
    family, node = FAMILY[version], gateway_of(pod, version)
    body = (
        "chain in { type nat hook prerouting priority -100;\n"
        f"{family} daddr {SERVICE[version]} dnat to {node}\n}}\n"
    )
    with links.table(family, body), conversations.served_by() as serving:
        conversations.exchange_streams(pod, serving, SERVICE[version])
        conversations.exchange_datagrams(pod, serving, SERVICE[version])
    assert counting.moved().keys() <= ANSWERS


@VERSIONS
def test_neighbours_resolve_each_other_again(gates: Gates, pod: labs.LabPod, version: int) -> None:
    """ARP, or IPv6 neighbour discovery, each way, with empty neighbour tables."""
    counting = enforce(gates, pod)
    with conversations.served_by() as serving:
        for namespace in ([], ["nsenter", f"--net={pod.netns.path}"]):
            subprocess.run([*namespace, "ip", "neigh", "flush", "all"], check=True)
            conversations.exchange_streams(pod, serving, gateway_of(pod, version))
    moved = counting.moved()
    assert moved[Verdict.PASS, Reason.ARP if version == 4 else Reason.CONTROL] > 0
    assert moved.keys() <= ANSWERS


@pytest.mark.parametrize("is_pod_s", [False, True], ids=["at-outside", "at-pod"])
@VERSIONS
def test_path_mtu_is_found(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, version: int, is_pod_s: bool
) -> None:
    """The host reports the MTU: to the pod about what it sends outside, or the other way."""
    outside = lab.add_pod("outside", 9)
    counting = enforce(gates, pod)
    sender, receiver = (outside, pod) if is_pod_s else (pod, outside)
    make_narrow(receiver)
    target = traffic.address(receiver, version)
    with conversations.served_by(receiver.open_socket) as serving:
        conversations.ping(sender, target)
        assert learns_mtu(sender, target) == 1300
        conversations.exchange_streams(sender, serving, target)
        conversations.exchange_datagrams(sender, serving, target)
    assert counting.moved().keys() <= CONTROL


def make_narrow(pod: labs.LabPod) -> None:
    """Its own side too: a veth takes nothing longer than its MTU from its other end."""
    for interface in [pod.interface, *([labs.BRIDGE] if pod.is_bridged else [])]:
        links.ip(f"link set {interface} mtu 1300")
    inside = ["nsenter", f"--net={pod.netns.path}", "ip", "link", "set", "eth0", "mtu", "1300"]
    subprocess.run(inside, check=True)


def learns_mtu(sender: labs.LabPod, target: str) -> int:
    """The path MTU in the source's kernel after one datagram that is too large."""
    is_ipv4 = conversations.version_of(target) == 4
    level = socket.IPPROTO_IP if is_ipv4 else socket.IPPROTO_IPV6
    mtu_discover, probe, mtu = (10, 2, 14) if is_ipv4 else (23, 2, 24)
    with sender.open_socket(traffic.family(4 if is_ipv4 else 6), socket.SOCK_DGRAM) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.setsockopt(level, mtu_discover, probe)
        sock.connect((target, UDP_PORT))
        sock.send(bytes(1400))
        with pytest.raises(OSError, match="Message too long"):  # as the host reports
            sock.recv(100)
        return sock.getsockopt(level, mtu)

"""Pods connect to the host behind gates that enforce: no packet is lost."""

import dataclasses
import socket
import subprocess
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.gates import Attachment, GateConfig, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import conversations, frames, links, traffic, wire
from tests.kernel.conversations import TCP_PORT, UDP_PORT
from tests.kernel.counting import CONTROL, Counting
from tests.kernel.reply_tables import start_reply_table
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
FAMILY = {4: "ip", 6: "ip6"}
SO_BINDTODEVICE = 25
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
    start_reply_table(gates, pod.ifindex)
    return Counting(gates, pod.ifindex)


@VERSIONS
def test_pod_talks_to_the_node(gates: Gates, pod: labs.LabPod, version: int) -> None:
    counting = enforce(gates, pod)
    node = traffic.gateway(pod, version)
    with conversations.served_by() as serving:
        conversations.exchange_all(pod, serving, node)
    moved = counting.moved()
    assert moved[Verdict.PASS, Reason.ESTABLISHED] > 1
    assert moved[Verdict.PASS, Reason.REPLY] >= 3
    assert moved.keys() <= ANSWERS


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
        conversations.request(sock, traffic.gateway(pod, version), 9)


@VERSIONS
def test_pod_talks_to_the_node_by_a_service_s_address(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    """As NodeLocal DNSCache is reached: the answers bear the service's address."""
    counting = enforce(gates, pod)
    family, node = FAMILY[version], traffic.gateway(pod, version)
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
            conversations.exchange_streams(pod, serving, traffic.gateway(pod, version))
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
    assert counting.moved_but_control() == {}


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


BEHIND = {4: "198.18.77.1", 6: "fd00:18:77::1"}


class Behind(labs.LabPod):
    """A pod whose sockets have an address that is not in its gate."""

    def open_socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        made = self.netns.socket(family, kind, protocol)
        made.bind((BEHIND[4 if family == socket.AF_INET else 6], 0))
        return made


def route_behind(pod: labs.LabPod, version: int) -> Behind:
    """A client behind the pod: its address is of no pod, as one that the gate does not know."""
    behind, own = BEHIND[version], traffic.address(pod, version)
    inside = ["nsenter", f"--net={pod.netns.path}", "ip"]
    flags = [] if version == 4 else ["nodad"]
    subprocess.run([*inside, "addr", "add", behind, "dev", "lo", *flags], check=True)
    # A worker of the kernel adds the route of an IPv6 address a moment later.
    look_up = [*inside, "route", "get", behind]
    wait_until("its route", lambda: "local" in subprocess.check_output(look_up, text=True))
    via = labs.BRIDGE if pod.is_bridged else pod.interface
    links.ip(f"route add {behind} via {own} dev {via}{'' if pod.is_bridged else ' onlink'}")
    return Behind(*(getattr(pod, field.name) for field in dataclasses.fields(pod)))


@VERSIONS
def test_client_behind_a_pod_that_routes_talks_to_the_node(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    counting = enforce(gates, pod)
    client = route_behind(pod, version)
    node = traffic.gateway(pod, version)
    with conversations.served_by() as serving:
        conversations.exchange_streams(client, serving, node)
        conversations.exchange_datagrams(client, serving, node)
    assert counting.moved().keys() <= ANSWERS
    with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        with pytest.raises(TimeoutError):
            sock.connect((BEHIND[version], TCP_PORT))
    assert counting.moved().keys() <= {(Verdict.DROP, Reason.STRAY), *CONTROL}


@pytest.fixture
def bridge_gate(pod: labs.LabPod, loaded: loader.Loaded, installation: pins.Pins) -> Iterator[None]:
    """As the agent attaches it to the bridges of pods."""
    made = HostDevicePrograms(loaded, installation, Attachment.CLSACT)
    made.ensure_bridges({links.index_of(labs.BRIDGE)} if pod.is_bridged else set())
    yield
    made.ensure_bridges(set())
    made.close()


@pytest.mark.usefixtures("bridge_gate")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
@VERSIONS
def test_client_behind_a_pod_that_routes_gets_an_error_at_once(
    gates: Gates, pod: labs.LabPod, version: int, kind: socket.SocketKind
) -> None:
    """A RST, or an ICMP error, of the host's kernel."""
    counting = enforce(gates, pod)
    client = route_behind(pod, version)
    with client.open_socket(traffic.family(version), kind) as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        with pytest.raises(ConnectionRefusedError):
            conversations.request(sock, traffic.gateway(pod, version), 9)
    assert counting.moved().keys() <= ANSWERS


@pytest.mark.usefixtures("bridge_gate")
@VERSIONS
def test_client_behind_a_pod_that_routes_finds_the_path_mtu(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, version: int
) -> None:
    outside = lab.add_pod("outside", 9)
    counting = enforce(gates, pod)
    client = route_behind(pod, version)
    make_narrow(outside)
    assert learns_mtu(client, traffic.address(outside, version)) == 1300
    assert counting.moved_but_control() == {}


OFFERED = "198.18.66.1"


@pytest.mark.parametrize("by", ["udp", "packet"])
@pytest.mark.parametrize("to", [OFFERED, "255.255.255.255"])
def test_dhcp_offers_reach_the_pod_that_requests_them(
    gates: Gates, pod: labs.LabPod, by: str, to: str
) -> None:
    """To an address that the pod does not have yet, as dnsmasq and dhcpd send them."""
    enforce(gates, pod)
    with pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as inside:
        inside.bind(("eth0", 3))
        inside.settimeout(traffic.LIMIT_SECONDS)
        mac = inside.getsockname()[4]
        offer = b"offer"
        assert not offers(pod, inside, mac, by, to, offer)
        discover = frames.Ends(
            frames.address("0.0.0.0"),
            frames.address("255.255.255.255"),
            b"\xff" * 6,
            source_port=68,
            port=67,
        )
        inside.send(frames.packet(discover, frames.UDP, frames.udp(discover, b"discover")))
        assert offers(pod, inside, mac, by, to, offer)


def offers(
    pod: labs.LabPod, inside: socket.socket, mac: bytes, by: str, to: str, offer: bytes
) -> bool:
    """Sends an offer and an answer to the pod's ARP request; whether the offer arrives first."""
    interface = labs.BRIDGE if pod.is_bridged else pod.interface
    if by == "packet":
        node = frames.address(traffic.gateway(pod, 4))
        ends = frames.Ends(node, frames.address(to), mac, source_port=67, port=68)
        with links.packet_socket(interface) as sock:
            wire.send(sock, frames.packet(ends, frames.UDP, frames.udp(ends, offer)))
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            server.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, interface.encode())
            server.bind(("", 67))
            if to == OFFERED:  # as dnsmasq does (SIOCSARP)
                shown = mac.hex(":")
                links.ip(
                    f"neigh replace {OFFERED} lladdr {shown} dev {interface}",
                    f"route replace {OFFERED} dev {interface}",
                )
            server.sendto(offer, (to, 68))
    end = b"the-last-frame"
    with pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.bind(("", 0))
        client.sendto(b"question", (traffic.gateway(pod, 4), UDP_PORT))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", UDP_PORT))
            server.sendto(end, (pod.ipv4, client.getsockname()[1]))
        has_offer = False
        while True:
            frame = inside.recv(1 << 16)
            has_offer |= offer in frame
            if end in frame:
                return has_offer

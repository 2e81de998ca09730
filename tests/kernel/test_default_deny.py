"""The default-deny table blocks host traffic to new pods and affects no other traffic."""

import contextlib
import dataclasses
import itertools
import socket
import struct
import subprocess
from collections.abc import Iterator

import pytest

from agent.default_deny import ruleset
from agent.lab import lab as labs
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests import polling
from tests.kernel import frames, links, syns, traffic, wire
from tests.kernel.default_deny import (
    PATHS,
    VERSIONS,
    Driven,
    OpenTable,
    default_deny,
    open_table,
    packets_of,
    ping,
    tcp_header,
    tracked,
    tracking,
)

pytestmark = pytest.mark.kernel

__all__ = ["default_deny", "open_table", "tracked", "tracking"]


@PATHS
@VERSIONS
def test_host_cannot_reach_a_new_pod(
    lab: labs.Lab, default_deny: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with pod.listen(80):
        assert traffic.node_is_dropped(pod, version)


@PATHS
@VERSIONS
def test_table_passes_everything_to_a_gated_pod(
    lab: labs.Lab, gates: Gates, default_deny: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with pod.listen(80):
        gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
        assert traffic.node_is_dropped(pod, version)
        default_deny.gate([pod.ifindex])
        assert traffic.node_reaches(pod, version)
        gates.configure(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        assert traffic.node_is_dropped(pod, version)


@PATHS
@VERSIONS
def test_frame_put_into_the_loopback_reaches_no_new_pod(
    lab: labs.Lab, default_deny: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    default_deny.exempt([pod.ifindex])
    numbers = itertools.count(20000)
    with (
        pod.listen(80),
        wire.Wire(pod) as line,
        links.packet_socket("lo") as sock,
        links.on_one_cpu(),
    ):
        assert traffic.node_reaches(pod, version)
        line.warm_up()

        def opens() -> bool:
            source = syns.STRANGER[version]
            ends = line.ends(version, source=source, source_port=next(numbers))
            to_node = dataclasses.replace(ends, pod_mac=bytes(6))
            wire.send(sock, frames.segment(to_node, frames.SYN))
            return line.flush().opened(ends)

        polling.wait_until("the path works", opens)
        default_deny.release([pod.ifindex])
        assert not opens()
        default_deny.gate([pod.ifindex])
        assert opens()  # the gate's part, and this pod's gate is not attached


@PATHS
def test_exempt_interface_stays_open(lab: labs.Lab, default_deny: Driven, bridged: bool) -> None:
    pod = lab.add_pod("other", 1, bridged=bridged)
    default_deny.exempt([pod.ifindex])
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)
        default_deny.release([pod.ifindex])
        assert traffic.node_is_dropped(pod, 4)


def test_interfaces_from_before_the_first_run_stay_open_until_gated(
    lab: labs.Lab, open_table: OpenTable
) -> None:
    """Among them is the uplink of a node that is itself a container."""
    pod = lab.add_pod("old", 1)
    opened = open_table()
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)
        opened.gate([pod.ifindex])
        opened.release([pod.ifindex])
        assert traffic.node_is_dropped(pod, 4)


@VERSIONS
@pytest.mark.parametrize("gated", [False, True])
def test_pods_reach_each_other_and_the_node(
    lab: labs.Lab, default_deny: Driven, gated: bool, version: int
) -> None:
    pods = [
        lab.add_pod("routed", 1),
        lab.add_pod("bridged", 2, bridged=True),
        lab.add_pod("routed2", 3),
        lab.add_pod("bridged2", 4, bridged=True),
    ]
    if gated:
        default_deny.gate(pod.ifindex for pod in pods)
    with traffic.listen_on_node(81) as node:
        for client in pods:
            traffic.pod_connects(client, traffic.NODE[version], version, node)
    for server in pods:
        with server.listen(80) as listening:
            for client in pods:
                if client is not server:
                    target = traffic.address(server, version)
                    traffic.pod_connects(client, target, version, listening)


@PATHS
@VERSIONS
@pytest.mark.parametrize("filters_bridged", ["0", "1"])
def test_bridged_frames_of_pods_pass_whether_or_not_netfilter_sees_them(
    lab: labs.Lab, default_deny: Driven, bridged: bool, version: int, filters_bridged: str
) -> None:
    server = lab.add_pod("server", 1, bridged=True)
    client = lab.add_pod("client", 2, bridged=bridged)
    with (
        links.sysctl("net/bridge/bridge-nf-call-iptables", filters_bridged),
        links.sysctl("net/bridge/bridge-nf-call-ip6tables", filters_bridged),
        server.listen(80) as listening,
    ):
        traffic.pod_connects(client, traffic.address(server, version), version, listening)


@PATHS
def test_client_outside_reaches_a_new_pod_through_the_node(
    lab: labs.Lab, default_deny: Driven, bridged: bool
) -> None:
    """A client beyond an exempt interface; plain, and translated on the node (a NodePort)."""
    outside = lab.add_pod("outside", 9)
    default_deny.exempt([outside.ifindex])
    server = lab.add_pod("server", 1, bridged=bridged)
    with server.listen(80) as listening:
        traffic.pod_connects(outside, server.ipv4, 4, listening)
        with nat(f"ip daddr {traffic.NODE[4]} tcp dport 80 dnat to {server.ipv4}"):
            traffic.pod_connects(outside, traffic.NODE[4], 4, listening)


def test_connections_by_synproxy_reach_new_pods(lab: labs.Lab, default_deny: Driven) -> None:
    """It answers the client itself, then sends a SYN of its own to the pod: without a socket."""
    outside, server = lab.add_pod("outside", 9), lab.add_pod("server", 1)
    script = """table inet test-synproxy {
      chain before {
        type filter hook prerouting priority -300;
        iifname "pgoutside" tcp flags & (syn | ack) == syn notrack
      }
      chain forward {
        type filter hook forward priority 0;
        iifname != "pgoutside" accept
        ct state { invalid, untracked } synproxy mss 1460 wscale 7 timestamp sack-perm
      }
    }"""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        with (
            links.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"),
            server.listen(80) as listening,
        ):
            traffic.pod_connects(outside, server.ipv4, 4, listening)
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "test-synproxy"], check=True)


@contextlib.contextmanager
def nat(rule: str) -> Iterator[None]:
    """Destination translation as kube-proxy does it, for what arrives and what the node sends."""
    chains = "".join(
        f"chain {hook} {{ type nat hook {hook} priority -100; {rule}; }}\n"
        for hook in ("prerouting", "output")
    )
    script = f"table ip test-nat {{\n{chains}}}\n"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "ip", "test-nat"], check=True)


@PATHS
def test_translated_address_does_not_bypass_the_table(
    lab: labs.Lab, default_deny: Driven, bridged: bool
) -> None:
    """Before translation the packet's output interface is another one."""
    pod = lab.add_pod("web", 1, bridged=bridged)
    with (
        pod.listen(80),
        nat(f"ip daddr 198.18.0.80 tcp dport 80 dnat to {pod.ipv4}"),
        socket.socket() as sock,
    ):
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        subprocess.run(["ip", "route", "add", "198.18.0.80", "dev", "lo"], check=True)
        with pytest.raises(TimeoutError):
            sock.connect(("198.18.0.80", 80))
        default_deny.gate([pod.ifindex])
        with socket.socket() as again:
            again.settimeout(traffic.LIMIT_SECONDS)
            again.connect(("198.18.0.80", 80))


def test_copies_that_a_bridge_floods_are_dropped(lab: labs.Lab, default_deny: Driven) -> None:
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    with pods[0].listen(80):
        default_deny.gate([pods[0].ifindex])
        assert traffic.node_reaches(pods[0], 4)  # the pod's MAC is resolved now
        traffic.forget_ports(labs.BRIDGE, pods)
        assert traffic.node_reaches(pods[0], 4)  # flooding to its gated port works
        default_deny.release([pods[0].ifindex])
        assert traffic.node_is_dropped(pods[0], 4)


@PATHS
@VERSIONS
def test_new_pod_can_ping_the_host_but_not_the_reverse(
    lab: labs.Lab, tracking: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    assert ping(traffic.NODE[version], pod.open_socket, version, traffic.LIMIT_SECONDS)
    assert not ping(traffic.address(pod, version), socket.socket, version)
    tracking.gate([pod.ifindex])
    assert ping(traffic.address(pod, version), socket.socket, version, traffic.LIMIT_SECONDS)


@pytest.mark.parametrize("cut", [8, 16])
def test_fragments_of_tcp_that_a_raw_socket_sends_are_dropped(
    lab: labs.Lab, default_deny: Driven, cut: int
) -> None:
    pod = lab.add_pod("web", 1)
    segment = tcp_header(0x10 if cut == 16 else 0x02)
    sniffer = pod.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    with sniffer, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        sniffer.settimeout(traffic.DROPPED_AFTER_SECONDS)
        for offset, part in ((0x2000, segment[:cut]), (cut // 8, segment[cut:])):
            header = (
                bytes([0x45, 0, 0, 0, 0x12, 0x34])
                + offset.to_bytes(2, "big")
                + bytes([64, 6, 0, 0])
                + socket.inet_aton(traffic.NODE[4])
                + socket.inet_aton(pod.ipv4)
            )
            with contextlib.suppress(PermissionError):
                raw.sendto(header + part, (pod.ipv4, 0))
        seen = []
        with contextlib.suppress(TimeoutError):
            while True:
                seen.append(sniffer.recv(100)[6:8])
    # A first fragment without a SYN may pass: without the rest it is useless.
    assert (cut // 8).to_bytes(2, "big") not in seen
    assert cut == 16 or seen == []


@pytest.mark.parametrize("cuts", [(0, 20), (0, 8, 20)], ids=["atomic", "two"])
def test_fragments_of_tcp_over_ipv6_never_arrive_whole(
    lab: labs.Lab, default_deny: Driven, cuts: tuple[int, ...]
) -> None:
    pod = lab.add_pod("web", 1)
    segment = tcp_header(0x02)
    sniffer = pod.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x86DD))
    with sniffer, socket.socket(socket.AF_INET6, socket.SOCK_RAW, 44) as raw:
        sniffer.settimeout(traffic.DROPPED_AFTER_SECONDS)
        for start, end in itertools.pairwise(cuts):
            more = end < len(segment)
            header = bytes([6, 0, 0, start | more, 0, 0, 0, 1])
            with contextlib.suppress(PermissionError):
                raw.sendto(header + segment[start:end], (pod.ipv6, 0))
        seen = []
        with contextlib.suppress(TimeoutError):
            while True:
                seen.append(sniffer.recv(100))
    # A later fragment may pass: without the first, which has the TCP header, it is useless.
    arrived = [packet[42:44] for packet in seen if packet[6] == 44]
    assert b"\x00\x00" not in [bytes([high, low & 0xF8]) for high, low in arrived]


@PATHS
def test_mark_set_by_a_process_does_not_bypass_the_table_and_is_kept(
    lab: labs.Lab, default_deny: Driven, bridged: bool
) -> None:
    """Half of the mark contains the tag for a moment; kube-proxy's bits are in the other half."""
    pod = lab.add_pod("web", 1, bridged=bridged)
    family = "bridge" if bridged else "inet"
    script = f"""table {family} test-mark {{
      counter seen {{ }}
      chain c {{ type filter hook postrouting priority 0; meta mark 0x4000 counter name seen; }}
    }}"""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        with pod.listen(80):
            for mark in (0x4000, ruleset.TAG, 0xFFFFFFFF, 0x00E80000):
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", mark))
                    sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
                    with pytest.raises(TimeoutError):
                        sock.connect((pod.ipv4, 80))
            assert packets_of(family) == 0
            default_deny.gate([pod.ifindex])
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0x4000)
                sock.settimeout(traffic.LIMIT_SECONDS)
                sock.connect((pod.ipv4, 80))
                # The SYN and the ACK; the ACK was never tagged.
                assert packets_of(family) == 2
    finally:
        subprocess.run(["nft", "delete", "table", family, "test-mark"], check=True)


def test_connections_within_the_host_stay_open(lab: labs.Lab, default_deny: Driven) -> None:
    with traffic.listen_on_node(81) as listening, socket.socket() as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((traffic.NODE[4], 81))
        peer, _ = listening.accept()
        peer.close()


@PATHS
def test_existing_connection_stays_open_after_release(
    lab: labs.Lab, default_deny: Driven, bridged: bool
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    default_deny.gate([pod.ifindex])
    with pod.listen(80) as listening, socket.socket() as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((pod.ipv4, 80))
        peer, _ = listening.accept()
        default_deny.release([pod.ifindex])
        with peer:
            sock.sendall(b"still here")
            peer.settimeout(traffic.LIMIT_SECONDS)
            assert peer.recv(100) == b"still here"

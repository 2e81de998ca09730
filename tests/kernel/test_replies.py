"""Of protocols other than TCP, replies from the host to the pod pass, and new flows do not."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.gates import pending_flows
from agent.lab import lab as labs
from agent.linux.pod_network import PodNetworkReader
from bpf import abi, loader, map_specs
from bpf.gates import GateConfig, Gates
from bpf.replies import (
    GROUP_LIFETIME_NS,
    LIFETIME_NS,
    ReplyFlow,
    ReplyKey,
    ReplyTable,
    ReplyTables,
)
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, links, traffic
from tests.kernel.reply_tables import start_reply_table

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PORT = 5300
WAIT_SECONDS = 0.3
PATIENCE_SECONDS = 20
QUESTION_SLOTS = abi.QUESTION_SETS * abi.REPLY_WAYS


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("asker", 1)


def enforce(gates: Gates, pod: labs.LabPod, *, grace_seconds: float = 0) -> None:
    config = GateConfig(Mode.ENFORCE, pod.addresses)
    gates.install(pod.ifindex, config, grace_seconds=grace_seconds)
    start_reply_table(gates, pod.ifindex)


@contextlib.contextmanager
def udp(made: socket.socket, address: str = "", port: int = 0) -> Iterator[socket.socket]:
    with made:
        made.settimeout(PATIENCE_SECONDS)
        made.bind((address, port))
        yield made


def node_udp(version: int, port: int = 0) -> contextlib.AbstractContextManager[socket.socket]:
    return udp(socket.socket(traffic.family(version), socket.SOCK_DGRAM), port=port)


def pod_udp(
    pod: labs.LabPod, version: int, port: int = 0
) -> contextlib.AbstractContextManager[socket.socket]:
    return udp(pod.open_socket(traffic.family(version), socket.SOCK_DGRAM), port=port)


def arrives(sock: socket.socket) -> bool:
    sock.settimeout(WAIT_SECONDS)
    try:
        sock.recvfrom(2048)
    except TimeoutError:
        return False
    return True


def count(gates: Gates, pod: labs.LabPod, verdict: Verdict, reason: Reason) -> int:
    return gates.counts()[pod.ifindex].get((verdict, reason), 0)


@VERSIONS
def test_a_datagram_that_the_node_starts_is_dropped(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with pod_udp(pod, version, PORT) as server, node_udp(version) as client:
        client.sendto(b"hello", (traffic.address(pod, version), PORT))
        assert not arrives(server)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


@VERSIONS
def test_replies_from_the_host_pass(gates: Gates, pod: labs.LabPod, version: int) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        server.sendto(b"answer", whence)
        assert client.recvfrom(64)[0] == b"answer"
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == 1
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0


@VERSIONS
def test_replies_pass_only_from_the_peer_of_the_flow(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with (
        node_udp(version, PORT) as server,
        node_udp(version) as stranger,
        pod_udp(pod, version) as client,
    ):
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        stranger.sendto(b"lie", whence)
        assert not arrives(client)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


@VERSIONS
def test_an_answer_written_by_a_raw_socket_is_dropped(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        # The kernel adds the IP header, so the source is the host's, as in a real answer.
        datagram = struct.pack("!HHHH", PORT, whence[1], 11, 0) + b"lie"
        with (
            socket.socket(traffic.family(version), socket.SOCK_RAW, socket.IPPROTO_UDP) as raw,
            contextlib.suppress(OSError),  # some protocols report a drop to the process: ENOBUFS
        ):
            raw.sendto(datagram, (traffic.address(pod, version), 0))
        assert not arrives(client)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


@VERSIONS
def test_a_long_answer_arrives_in_fragments(gates: Gates, pod: labs.LabPod, version: int) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        server.sendto(bytes(5000), whence)
        assert client.recv(8192) == bytes(5000)


@VERSIONS
def test_a_long_datagram_that_the_node_starts_does_not_arrive(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with pod_udp(pod, version, PORT) as server, node_udp(version) as client:
        client.sendto(bytes(5000), (traffic.address(pod, version), PORT))
        assert not arrives(server)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


@VERSIONS
def test_the_pod_pings_the_node_and_not_the_other_way(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    kind = (traffic.family(version), socket.SOCK_RAW, ICMP[version])
    with pod.open_socket(*kind) as inside, socket.socket(*kind) as outside:
        assert is_answered(inside, traffic.NODE[version], version)
        assert not is_answered(outside, traffic.address(pod, version), version)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


ICMP = {4: socket.IPPROTO_ICMP, 6: socket.IPPROTO_ICMPV6}
ECHO_REQUEST, ECHO_REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}


def is_answered(sock: socket.socket, address: str, version: int) -> bool:
    """Whether an echo request is answered; with an identifier of its own."""
    identifier = os.urandom(2)
    message = bytes([ECHO_REQUEST[version], 0]) + bytes(2) + identifier + bytes(2)
    if version == 4:  # for IPv6 the kernel fills it in
        message = message[:2] + struct.pack("!H", frames.checksum(message)) + message[4:]
    with contextlib.suppress(OSError):
        sock.sendto(message, (address, 0))
    sock.settimeout(WAIT_SECONDS)
    start = 20 if version == 4 else 0  # a raw IPv4 socket shows the IP header
    try:
        while True:
            answer = sock.recv(2048)[start:]
            if answer[0] == ECHO_REPLY[version] and answer[4:6] == identifier:
                return True
    except TimeoutError:
        return False


@VERSIONS
def test_protocols_without_ports_are_filtered_too(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    protocol = 47  # GRE
    with (
        pod.open_socket(traffic.family(version), socket.SOCK_RAW, protocol) as inside,
        socket.socket(traffic.family(version), socket.SOCK_RAW, protocol) as outside,
    ):
        outside.sendto(bytes(8), (traffic.address(pod, version), 0))
        assert not arrives(inside)
        inside.sendto(bytes(8), (traffic.NODE[version], 0))
        outside.sendto(bytes(8), (traffic.address(pod, version), 0))
        assert arrives(inside)


def test_answers_to_a_group_pass_from_any_source(gates: Gates, pod: labs.LabPod) -> None:
    enforce(gates, pod)
    group, port = "239.18.0.1", 5301
    with node_udp(4, port) as server, pod_udp(pod, 4) as client:
        join(server, group, pod.ifindex)
        client.sendto(b"anybody?", (group, port))
        _, whence = server.recvfrom(64)
        server.sendto(b"me", whence)
        assert client.recvfrom(64)[0] == b"me"


@VERSIONS
def test_a_pod_cannot_make_room_in_its_neighbour_s_table(
    gates: Gates, lab: labs.Lab, pod: labs.LabPod, version: int
) -> None:
    noisy = lab.add_pod("noisy", 2)
    enforce(gates, pod)
    enforce(gates, noisy)
    with (
        node_udp(version, PORT) as server,
        pod_udp(pod, version) as client,
        noisy.open_socket(traffic.family(version), socket.SOCK_DGRAM) as flood,
    ):
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        for port in range(10_000, 14_000):
            flood.sendto(b"", (traffic.NODE[version], port))
        server.sendto(b"answer", whence)
        assert client.recvfrom(64)[0] == b"answer"


@VERSIONS
def test_answers_pass_during_grace_and_are_counted(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        client.sendto(b"question before there is a gate", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        enforce(gates, pod, grace_seconds=60)
        server.sendto(b"answer", whence)
        assert client.recvfrom(64)[0] == b"answer"
    assert count(gates, pod, Verdict.PASS, Reason.GRACE) == 1


def test_grace_is_not_renewed_by_installing_again(gates: Gates, pod: labs.LabPod) -> None:
    enforce(gates, pod)
    enforce(gates, pod, grace_seconds=60)
    with pod_udp(pod, 4, PORT) as server, node_udp(4) as client:
        client.sendto(b"hello", (pod.ipv4, PORT))
        assert not arrives(server)


def test_audit_drops_no_datagram_and_counts_it(gates: Gates, pod: labs.LabPod) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    start_reply_table(gates, pod.ifindex)
    with pod_udp(pod, 4, PORT) as server, node_udp(4) as client:
        client.sendto(b"hello", (pod.ipv4, PORT))
        assert arrives(server)
    assert count(gates, pod, Verdict.WOULD_DROP, Reason.NODE) == 1


@VERSIONS
def test_pods_talk_to_each_other_untouched(
    gates: Gates, lab: labs.Lab, pod: labs.LabPod, version: int
) -> None:
    other = lab.add_pod("other", 2, bridged=True)
    enforce(gates, pod)
    enforce(gates, other)
    with pod_udp(pod, version, PORT) as server, pod_udp(other, version) as client:
        client.sendto(b"hello", (traffic.address(pod, version), PORT))
        assert server.recvfrom(64)[0] == b"hello"


def question(
    pod: labs.LabPod, version: int, port: int, *, peer: str = "", protocol: int = socket.IPPROTO_UDP
) -> ReplyFlow:
    """From this port of the pod to PORT of the node, or of `peer`."""
    return ReplyFlow(
        protocol,
        ipaddress.ip_address(traffic.address(pod, version)),
        port,
        ipaddress.ip_address(peer or traffic.NODE[version]),
        PORT,
    )


@pytest.mark.parametrize(
    ("version", "protocol", "peer"),
    [
        pytest.param(4, socket.IPPROTO_UDP, "198.18.0.1", id="UDP over IPv4"),
        pytest.param(6, socket.IPPROTO_UDP, "fd00:18::1", id="UDP over IPv6"),
        pytest.param(4, 136, "198.18.0.1", id="UDP-Lite over IPv4"),
        pytest.param(6, 136, "fd00:18::1", id="UDP-Lite over IPv6"),
        pytest.param(4, socket.IPPROTO_UDP, "198.19.5.5", id="an address of nobody"),
        pytest.param(4, socket.IPPROTO_UDP, "239.18.0.1", id="an IPv4 group"),
        pytest.param(6, socket.IPPROTO_UDP, "ff05::1812", id="an IPv6 group"),
    ],
)
def test_user_space_finds_what_a_packet_left(
    gates: Gates,
    loaded: loader.Loaded,
    pod: labs.LabPod,
    version: int,
    protocol: int,
    peer: str,
) -> None:
    enforce(gates, pod)
    with udp(pod.open_socket(traffic.family(version), socket.SOCK_DGRAM, protocol)) as client:
        client.sendto(b"question", (peer, PORT))
        flow = question(pod, version, client.getsockname()[1], peer=peer, protocol=protocol)
    tables, now_ns = ReplyTables(loaded), time.monotonic_ns()
    assert tables.contains(pod.ifindex, flow, now_ns)
    assert not tables.contains(pod.ifindex, flow, now_ns + LIFETIME_NS)
    assert not tables.contains(pod.ifindex, dataclasses.replace(flow, pod_port=1), now_ns)


@VERSIONS
def test_replies_to_flows_from_before_pass_once_filled_in(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        client.sendto(b"question before there is a gate", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        enforce(gates, pod)
        gates.fill_reply_table(pod.ifindex, [question(pod, version, whence[1])])
        server.sendto(b"answer", whence)
        assert client.recvfrom(64)[0] == b"answer"
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == 1


def test_start_of_a_reply_table_is_new_only_once(gates: Gates, pod: labs.LabPod) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    assert start_reply_table(gates, pod.ifindex)
    assert not start_reply_table(gates, pod.ifindex)


def test_grace_period_ends_at_the_given_time_and_never_later(
    gates: Gates, pod: labs.LabPod
) -> None:
    enforce(gates, pod, grace_seconds=60)
    assert gates.fill_reply_table(pod.ifindex, [])
    assert count_graces(gates, pod) == 1
    gates.end_grace(pod.ifindex, time.monotonic_ns() + 60_000_000_000)
    assert count_graces(gates, pod) == 2
    gates.end_grace(pod.ifindex, 0)
    assert count_graces(gates, pod) == 2
    gates.end_grace(pod.ifindex, time.monotonic_ns() + 60_000_000_000)
    assert count_graces(gates, pod) == 2


def count_graces(gates: Gates, pod: labs.LabPod) -> int:
    """After one more datagram of the node's."""
    with node_udp(4) as client:
        client.sendto(b"hello", (pod.ipv4, PORT))
    return count(gates, pod, Verdict.PASS, Reason.GRACE)


def test_flows_without_a_free_slot_are_reported(gates: Gates, pod: labs.LabPod) -> None:
    flows = [question(pod, 4, port) for port in range(10_000, 10_000 + QUESTION_SLOTS + 1)]
    enforce(gates, pod, grace_seconds=60)
    assert gates.fill_reply_table(pod.ifindex, flows[: QUESTION_SLOTS // 4])
    assert gates.fill_reply_table(pod.ifindex, flows[: QUESTION_SLOTS // 4])
    assert not gates.fill_reply_table(pod.ifindex, flows)


def read_pending(pod: labs.LabPod) -> pending_flows.PendingFlows:
    return asyncio.run(_read_pending(pod))


async def _read_pending(pod: labs.LabPod) -> pending_flows.PendingFlows:
    network = await PodNetworkReader().read(pod.netns)
    return pending_flows.read(pod.netns, network)


def test_new_pod_has_no_pending_flow(pod: labs.LabPod) -> None:
    assert read_pending(pod) == pending_flows.PendingFlows((), "")


@VERSIONS
@pytest.mark.parametrize("protocol", [socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE])
def test_connected_sockets_show_the_pods_peers(
    pod: labs.LabPod, version: int, protocol: int
) -> None:
    with pod.open_socket(traffic.family(version), socket.SOCK_DGRAM, protocol) as client:
        client.connect((traffic.NODE[version], PORT))
        flow = question(pod, version, client.getsockname()[1], protocol=protocol)
        assert read_pending(pod) == pending_flows.PendingFlows((flow,), "")


def test_dual_stack_socket_has_an_ipv4_flow(pod: labs.LabPod) -> None:
    with pod.open_socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
        client.connect((f"::ffff:{traffic.NODE[4]}", PORT))
        assert read_pending(pod).flows == (question(pod, 4, client.getsockname()[1]),)


def test_flow_of_the_pod_to_itself_is_not_pending(pod: labs.LabPod) -> None:
    with pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", PORT))
        assert read_pending(pod) == pending_flows.PendingFlows((), "")


@pytest.mark.parametrize(
    ("family", "kind", "protocol", "words"),
    [
        pytest.param(socket.AF_INET, socket.SOCK_DGRAM, 0, "unconnected", id="UDP"),
        pytest.param(socket.AF_INET6, socket.SOCK_DGRAM, 0, "unconnected", id="UDP over IPv6"),
        pytest.param(socket.AF_INET, socket.SOCK_RAW, 47, "RAW", id="raw"),
        pytest.param(socket.AF_PACKET, socket.SOCK_RAW, 0, "PACKET", id="packet"),
    ],
)
def test_sockets_with_unknown_peers_are_reported(
    pod: labs.LabPod, family: int, kind: int, protocol: int, words: str
) -> None:
    with pod.open_socket(family, kind, protocol) as sock:
        if kind == socket.SOCK_DGRAM:
            sock.bind(("", 0))
        assert words in read_pending(pod).unknown


def test_namespaces_behind_the_pod_make_peers_unknown(pod: labs.LabPod) -> None:
    inside = ["nsenter", f"--net={pod.netns.path}", "ip", "link"]
    subprocess.run([*inside, "add", "inner0", "up", "type", "bridge"], check=True)
    assert read_pending(pod).unknown == "inner0"


def test_more_flows_than_a_table_should_hold_are_incomplete(pod: labs.LabPod) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as stack:
        for port in range(10_000, 11_100):
            client = stack.enter_context(pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM))
            client.connect((traffic.NODE[4], port))
        pending = read_pending(pod)
    assert len(pending.flows) < 1100
    assert pending.unknown


@VERSIONS
def test_stream_after_one_question_stays_open(
    gates: Gates, loaded: loader.Loaded, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        port = client.getsockname()[1]
        long_ago_ns = time.monotonic_ns() - LIFETIME_NS + 60 * 10**9
        fill(loaded, pod, question(pod, version, port), long_ago_ns)
        server.sendto(b"more", (traffic.address(pod, version), port))
        assert client.recvfrom(64)[0] == b"more"
        later_ns = long_ago_ns + LIFETIME_NS
        flow = question(pod, version, port)
        assert ReplyTables(loaded).contains(pod.ifindex, flow, later_ns)


@VERSIONS
def test_only_further_answers_make_a_flow_younger(
    gates: Gates, loaded: loader.Loaded, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server, pod_udp(pod, version) as client:
        port = client.getsockname()[1]
        flow = question(pod, version, port)
        asked_ns = time.monotonic_ns() - 5 * 10**9
        expired_ns = asked_ns + LIFETIME_NS + 10**6
        fill(loaded, pod, flow, asked_ns)
        for is_younger in (False, True):
            server.sendto(b"answer", (traffic.address(pod, version), port))
            assert client.recvfrom(64)[0] == b"answer"
            assert ReplyTables(loaded).contains(pod.ifindex, flow, expired_ns) == is_younger


@VERSIONS
def test_answers_to_a_group_have_a_few_seconds(
    gates: Gates, loaded: loader.Loaded, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    group = {4: "239.18.0.1", 6: "ff05::1812"}[version]
    with (
        node_udp(version, PORT) as server,
        pod_udp(pod, version) as client,
        pod_udp(pod, version) as early_client,
    ):
        early_port = early_client.getsockname()[1]
        fill(loaded, pod, question(pod, version, early_port, peer=group), time.monotonic_ns())
        server.sendto(b"early", (traffic.address(pod, version), early_port))
        assert early_client.recvfrom(64)[0] == b"early"

        port = client.getsockname()[1]
        flow = question(pod, version, port, peer=group)
        fill(loaded, pod, flow, time.monotonic_ns() - GROUP_LIFETIME_NS - 10**9)
        server.sendto(b"late", (traffic.address(pod, version), port))
        assert not arrives(client)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


@pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
@VERSIONS
def test_answers_to_a_group_pass_only_from_the_port_that_the_pod_sent_to(
    gates: Gates, lab: labs.Lab, version: int, is_bridged: bool
) -> None:
    pod = lab.add_pod("finder", 4, bridged=is_bridged)
    if is_bridged:
        links.wait_for_port(pod.interface)
    enforce(gates, pod)
    group = {4: "239.18.0.1", 6: "ff05::1812"}[version]
    interface = links.index_of(labs.BRIDGE) if is_bridged else pod.ifindex
    with (
        node_udp(version, PORT) as server,
        node_udp(version) as other,
        pod_udp(pod, version) as client,
    ):
        join(server, group, interface)
        client.sendto(b"anybody?", (group, PORT))
        _, whence = server.recvfrom(64)
        other.sendto(b"not requested", whence)
        server.sendto(b"me", whence)
        assert client.recvfrom(64)[0] == b"me"
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1


def join(sock: socket.socket, group: str, interface: int) -> None:
    packed = socket.inet_pton(sock.family, group)
    if sock.family == socket.AF_INET:
        request = struct.pack("=4s4si", packed, bytes(4), interface)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    else:
        request = struct.pack("=16si", packed, interface)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)


def fill(loaded: loader.Loaded, pod: labs.LabPod, flow: ReplyFlow, sent_ns: int) -> None:
    value = loaded.map(map_specs.REPLIES).get(struct.pack("=I", pod.ifindex))
    assert value is not None
    with ReplyTable(struct.unpack("=I", value)[0]) as table:
        assert table.fill([flow], ReplyKey.ensure(loaded), sent_ns)


def test_answers_to_a_broadcast_to_the_subnet_pass(gates: Gates, lab: labs.Lab) -> None:
    pod = lab.add_pod("finder", 3, bridged=True)
    enforce(gates, pod)
    with node_udp(4, PORT) as server, pod_udp(pod, 4) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        client.sendto(b"anybody?", ("198.18.2.255", PORT))
        _, whence = server.recvfrom(64)
        server.sendto(b"me", whence)
        assert client.recvfrom(64)[0] == b"me"

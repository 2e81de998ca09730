"""Packets that the relay's end of its pair passes: no SYNs, and nothing but TCP."""

import contextlib
import socket
import struct
import subprocess
from collections.abc import Callable

import pytest

from agent.lab import lab as labs
from bpf import loader, pins, program_specs, syscalls
from tests.kernel import frames, offers, redirecting, skb, traffic

pytestmark = pytest.mark.kernel

LOOPBACK_IFINDEX = 1
PORT = 8080
BOTH = pytest.mark.parametrize("version", [4, 6])
ENDS = {
    4: frames.Ends(frames.address("198.18.0.1"), frames.address("198.18.64.20")),
    6: frames.Ends(frames.address("fd00:18::1"), frames.address("fd00:18:64::20")),
}

MSS = struct.pack("!BBH", 2, 4, 1460)
NO_OPERATIONS = bytes((1, 1, 1, 0))
SCTP = 132
SOLICIT_ROUTER, ADVERTISE_ROUTER, SOLICIT, ADVERTISE, REDIRECT, REPORT_MLD = (
    *(133, 134, 135, 136, 137, 143),
)

OPENING = {
    "plain": frames.SYN,
    "with PSH and URG": frames.SYN | frames.PSH | frames.URG,
    "with ECN": frames.SYN | frames.ECE | frames.CWR,
    "with FIN": frames.SYN | frames.FIN,
    "with RST": frames.SYN | frames.RST,
}
OTHERS = {
    "ACK": frames.ACK,
    "data": frames.ACK | frames.PSH,
    "FIN": frames.FIN | frames.ACK,
    "bare FIN": frames.FIN,
    "RST": frames.RST,
    "RST and ACK": frames.RST | frames.ACK,
    "SYN and ACK": frames.SYN | frames.ACK,
    "nothing": 0,
}

Wrap = Callable[[frames.Ends, bytes], bytes]


def plain(ends: frames.Ends, segment: bytes) -> bytes:
    return frames.packet(ends, frames.TCP, segment)


def behind_headers(ends: frames.Ends, segment: bytes) -> bytes:
    """IPv4 options, or IPv6 extension headers."""
    if ends.family == 4:
        packet = frames.ipv4(ends, frames.TCP, segment, options=NO_OPERATIONS * 5)
        return frames.ethernet(ends, frames.ETHERTYPE_IPV4, packet)
    packet = frames.ipv6(ends, frames.DSTOPTS, frames.chain(5, frames.TCP, segment))
    return frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet)


WAYS = pytest.mark.parametrize("wrap", [plain, behind_headers])


def is_let_in(loaded: loader.Loaded, frame: bytes) -> bool:
    program = loaded.programs[program_specs.HOLD_SYNS]
    answer, _ = syscalls.run_program(program, frame, skb.context(LOOPBACK_IFINDEX, 0))
    assert answer in (skb.TCX_NEXT, skb.TCX_DROP)
    return answer == skb.TCX_NEXT


@BOTH
@WAYS
@pytest.mark.parametrize("flags", OPENING.values(), ids=OPENING.keys())
@pytest.mark.parametrize("options", [b"", MSS * 5], ids=["without options", "with options"])
def test_new_flows_are_held(
    loaded: loader.Loaded, version: int, wrap: Wrap, flags: int, options: bytes
) -> None:
    ends = ENDS[version]
    segment = frames.tcp(ends, flags, options=options, data=b"early")
    assert not is_let_in(loaded, wrap(ends, segment))


@BOTH
@WAYS
@pytest.mark.parametrize("flags", OTHERS.values(), ids=OTHERS.keys())
def test_segments_of_open_connections_pass(
    loaded: loader.Loaded, version: int, wrap: Wrap, flags: int
) -> None:
    ends = ENDS[version]
    assert is_let_in(loaded, wrap(ends, frames.tcp(ends, flags, data=b"hello")))


@BOTH
@pytest.mark.parametrize("flags", [frames.SYN, frames.ACK])
@pytest.mark.parametrize("tag", [frames.ETHERTYPE_VLAN, frames.ETHERTYPE_SERVICE_VLAN])
def test_tag_hides_nothing(loaded: loader.Loaded, version: int, flags: int, tag: int) -> None:
    ends = ENDS[version]
    segment = frames.tcp(ends, flags)
    assert not is_let_in(loaded, frames.packet(ends, frames.TCP, segment, tags=(tag,)))


@pytest.mark.parametrize("offset_bytes", [0, 8])
def test_fragment_hides_nothing(loaded: loader.Loaded, offset_bytes: int) -> None:
    four, six = ENDS[4], ENDS[6]
    part = frames.tcp(four, frames.ACK)[offset_bytes:]
    bits = frames.MORE_FRAGMENTS | offset_bytes // 8
    packet = frames.ipv4(four, frames.TCP, part, fragment=bits)
    assert not is_let_in(loaded, frames.ethernet(four, frames.ETHERTYPE_IPV4, packet))
    part = frames.tcp(six, frames.ACK)[offset_bytes:]
    for more in (True, False):
        header = frames.fragment_header(frames.TCP, offset_bytes, more=more, identification=7)
        packet = frames.ipv6(six, frames.FRAGMENT, header + part)
        assert not is_let_in(loaded, frames.ethernet(six, frames.ETHERTYPE_IPV6, packet))


@BOTH
def test_segment_that_ends_before_its_flags_is_held(loaded: loader.Loaded, version: int) -> None:
    ends = ENDS[version]
    segment = frames.tcp(ends, frames.ACK)
    assert not is_let_in(loaded, frames.packet(ends, frames.TCP, segment[:13]))
    assert is_let_in(loaded, frames.packet(ends, frames.TCP, segment[:14]))


def test_headers_without_end_are_held(loaded: loader.Loaded) -> None:
    ends = ENDS[6]
    chain = frames.chain(9, frames.TCP, frames.tcp(ends, frames.ACK))
    packet = frames.ipv6(ends, frames.DSTOPTS, chain)
    assert not is_let_in(loaded, frames.ethernet(ends, frames.ETHERTYPE_IPV6, packet))


@BOTH
@pytest.mark.parametrize("protocol", [frames.UDP, frames.IGMP, frames.ESP, SCTP])
def test_other_protocols_are_held(loaded: loader.Loaded, version: int, protocol: int) -> None:
    ends = ENDS[version]
    assert not is_let_in(loaded, frames.packet(ends, protocol, frames.udp(ends)))


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        *((4, kind) for kind in (0, 3, 5, 8, 11)),
        *((6, kind) for kind in (1, 2, 128, 129)),
        *((6, kind) for kind in (SOLICIT_ROUTER, ADVERTISE_ROUTER, REDIRECT, REPORT_MLD)),
        *((4, kind) for kind in (SOLICIT, ADVERTISE)),
    ],
)
def test_echoes_errors_and_routers_are_held(loaded: loader.Loaded, version: int, kind: int) -> None:
    ends = ENDS[version]
    protocol = frames.ICMP if version == 4 else frames.ICMPV6
    assert not is_let_in(loaded, frames.packet(ends, protocol, frames.icmp(ends, kind)))


def test_neighbours_find_each_other(loaded: loader.Loaded) -> None:
    six = ENDS[6]
    assert is_let_in(loaded, frames.arp(ENDS[4], 1))
    assert is_let_in(loaded, frames.arp(ENDS[4], 2))
    for kind in (SOLICIT, ADVERTISE):
        assert is_let_in(loaded, frames.packet(six, frames.ICMPV6, frames.icmp(six, kind)))


def test_neighbours_are_not_found_by_the_other_family_s_protocol(loaded: loader.Loaded) -> None:
    four = ENDS[4]
    for kind in (SOLICIT, ADVERTISE):
        assert not is_let_in(loaded, frames.packet(four, frames.ICMPV6, frames.icmp(four, kind)))


def test_unknown_ethertype_is_held(loaded: loader.Loaded) -> None:
    assert not is_let_in(loaded, frames.ethernet(ENDS[4], 0x88B5, bytes(46)))


# Holds new flows at eth0 of the namespace that it runs in.
HOLD = """
import socket, sys
from bpf import pins, redirect as redirects, sources, tcx
if sys.argv[2] == "clsact":
    tcx.TcxLinks.is_supported = staticmethod(lambda: False)
redirect = redirects.Redirect.open(pins.Pins(sys.argv[1]), sources.fingerprint())
redirect.attach_hold(socket.if_nametoindex("eth0"))
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def inside(lab: labs.Lab) -> labs.LabPod:
    """A pod in the role of the relay's namespace."""
    return lab.add_pod("inside", 1)


def hold(
    pod: labs.LabPod, installation: pins.Pins, how: str
) -> contextlib.AbstractContextManager["subprocess.Popen[bytes]"]:
    if how == "tcx":
        offers.need_tcx()
    return redirecting.child(HOLD, str(installation.bpffs), how, netns=pod.netns.path)


@BOTH
@pytest.mark.parametrize("how", ["tcx", "clsact"])
def test_held_syn_is_seen_by_a_packet_socket_and_open_connections_continue(
    loaded: loader.Loaded, inside: labs.LabPod, installation: pins.Pins, version: int, how: str
) -> None:
    address = traffic.address(inside, version)
    with (
        inside.listen(PORT) as server,
        socket.create_connection((address, PORT), traffic.LIMIT_SECONDS) as open_before,
        server.accept()[0] as served,
        inside.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap,
        hold(inside, installation, how),
    ):
        assert traffic.node_is_dropped(inside, version, PORT)
        assert saw_syn(tap)
        served.settimeout(traffic.LIMIT_SECONDS)
        subprocess.run(["ip", "neigh", "flush", "dev", inside.interface], check=True)
        open_before.sendall(b"hello")
        assert served.recv(64) == b"hello"


def saw_syn(tap: socket.socket) -> bool:
    """Whether the SYN to PORT is among what has come so far."""
    tap.setblocking(False)
    while True:
        try:
            frame = tap.recv(1 << 16)
        except BlockingIOError:
            return False
        # Without options or extension headers, as the kernel sends it.
        transport = frame[34:] if frame[12:14] == b"\x08\x00" else frame[54:]
        if transport[2:4] == struct.pack("!H", PORT) and transport[13] & 0x3F == frames.SYN:
            return True


@BOTH
def test_holding_ends_with_its_process(
    loaded: loader.Loaded, inside: labs.LabPod, installation: pins.Pins, version: int
) -> None:
    with inside.listen(PORT), hold(inside, installation, "tcx") as relay:
        assert traffic.node_is_dropped(inside, version, PORT)
        redirecting.kill(relay)
        assert traffic.node_reaches(inside, version, PORT)

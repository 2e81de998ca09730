"""A pod behind a gate, a neighbour behind another, and sockets inside the pod that watch.

Nothing waits by the clock: an end marker follows the sent packets, which every gate admits by a
rule, and the pod's side is read until it arrives. It takes the path of the packets before it,
because a packet that is routed twice may be overtaken by one that is routed once.
"""

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator

from agent.lab.lab import LabPod
from bpf.gates import GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, traffic
from tests.kernel.counting import Counting
from tests.kernel.reply_tables import start_reply_table

END_PORT = 9
TCP_PORT = 80
UDP_PORT = 5300

Moved = dict[tuple[Verdict, Reason], int]

_END = Rule(SourceKind.ANY, socket.IPPROTO_UDP, END_PORT, END_PORT)
_PACKET_OUTGOING = 4
_ETH_P_ALL = 3
_numbers = itertools.count()


class PodState:
    """See `guarded`. Counters are read without the end markers and the kernel's own control."""

    def __init__(self, gates: Gates, pod: LabPod, neighbour: LabPod, rules: tuple[Rule, ...]):
        self.pod = pod
        self.neighbour = neighbour
        self._gates = gates
        self._pods = (pod, neighbour)
        self._rules = (*rules, _END)
        self._inside = pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._inside.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._inside.bind(("eth0", _ETH_P_ALL))
        self._inside.settimeout(traffic.LIMIT_SECONDS)
        self.mac: bytes = self._inside.getsockname()[4]
        self.set_mode(Mode.OFF)

    def close(self) -> None:
        self._inside.close()

    def set_mode(self, mode: Mode) -> None:
        """Of both gates; counters start at zero."""
        self.arrived()
        for pod in self._pods:
            self._gates.install(pod.ifindex, GateConfig(mode, pod.addresses, self._rules))
            start_reply_table(self._gates, pod.ifindex)
        self._own, self._neighbours = (Counting(self._gates, pod.ifindex) for pod in self._pods)

    def moved(self) -> Moved:
        """Counts of the pod's gate since the last call or change of mode."""
        return _without_ends(self._own)

    def moved_at_neighbour(self) -> Moved:
        return _without_ends(self._neighbours)

    def arrived(
        self, send_end: Callable[[bytes], object] | None = None, *, with_control: bool = False
    ) -> list[bytes]:
        """Frames that reached the pod up to the end marker; harmless ones only `with_control`.

        send_end: sends a datagram with this payload to the pod's END_PORT, IPv4 or IPv6; by a
        socket of the node unless given.
        """
        end = b"podgate-end-%d" % next(_numbers)
        (send_end or self._send_end)(end)
        seen: list[bytes] = []
        while True:
            frame, (_, _, kind, *_) = self._inside.recvfrom(1 << 17)
            if kind == _PACKET_OUTGOING:
                continue
            if end in frame:
                return seen
            if with_control or not _is_quiet(frame):
                seen.append(frame)

    def _send_end(self, end: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(end, (self.pod.ipv4, END_PORT))


@contextlib.contextmanager
def guarded(gates: Gates, pod: LabPod, neighbour: LabPod, *rules: Rule) -> Iterator[PodState]:
    """Servers in `pod` on TCP_PORT and UDP_PORT, gates that are off, and the test on one CPU.

    Two consecutive packets of a process that moves between CPUs may be reordered.
    """
    with contextlib.ExitStack() as stack:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        stack.callback(os.sched_setaffinity, 0, before)
        stack.enter_context(pod.listen(TCP_PORT))
        for port in (UDP_PORT, END_PORT):  # so that the pod sends no errors about closed ports
            stack.enter_context(_datagram_server(pod, port))
        assert traffic.node_reaches(pod, 4)  # neighbours are resolved, a bridge port is up
        assert traffic.node_reaches(pod, 6)
        made = stack.enter_context(contextlib.closing(PodState(gates, pod, neighbour, rules)))
        made.arrived()
        yield made


def _datagram_server(pod: LabPod, port: int) -> socket.socket:
    sock = pod.open_socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", port))
    return sock


def _without_ends(counting: Counting) -> Moved:
    moved = counting.moved_but_control()
    moved.pop((Verdict.PASS, Reason.RULE), None)
    return moved


def _is_quiet(frame: bytes) -> bool:
    """Whether the frame is harmless: control of the kernels, or the end of a connection."""
    (ethertype,) = struct.unpack_from("!H", frame, 12)
    if ethertype == frames.ETHERTYPE_ARP:
        return True
    if ethertype == frames.ETHERTYPE_IPV4:
        protocol, transport = frame[23], frame[14 + (frame[14] & 0x0F) * 4 :]
        if protocol == frames.ICMP:
            return transport[0] in (3, 11, 12)
        return protocol == frames.IGMP or _is_reset(protocol, transport)
    protocol, transport = frame[20], frame[54:]
    if protocol == frames.ICMPV6:
        return transport[0] in (1, 2, 3, 4, *range(130, 137), 143)
    # Only MLD follows hop-by-hop options without a program that sends it.
    return _is_reset(protocol, transport) or protocol == frames.HOPOPTS


def _is_reset(protocol: int, transport: bytes) -> bool:
    return protocol == frames.TCP and len(transport) > 13 and bool(transport[13] & frames.RST)

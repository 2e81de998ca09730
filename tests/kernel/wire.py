"""A packet socket on the node's side of a pod's interface, and one inside the pod that listens.

Nothing waits by the clock: after the injected frames a sentinel is sent, which every gate passes
(an ARP frame of an unused operation), and the pod's side is read until it arrives.
"""

import dataclasses
import errno
import itertools
import socket
import struct
from collections.abc import Iterator, Sequence

from agent.lab.lab import LabPod
from tests.kernel import frames

ETH_P_ALL = 0x0003
_PACKET_OUTGOING = 4
_sentinels = itertools.count(0x1000)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Frames at the pod's interface between injection and sentinel."""

    arrived: tuple[bytes, ...]
    sent: tuple[bytes, ...]

    def opened(self, ends: frames.Ends) -> bool:
        """Whether the pod's stack answered with SYN+ACK: a connection was opened."""
        return any(_is_syn_ack(frame, ends) for frame in self.sent)


class Wire:
    """Both ends of one pod's interface."""

    def __init__(self, pod: LabPod) -> None:
        self.pod = pod
        kind = socket.SOCK_RAW
        self.node = socket.socket(socket.AF_PACKET, kind, socket.htons(ETH_P_ALL))
        self.node.bind((pod.interface, 0))  # send only: protocol 0 receives nothing
        self.inside = pod.open_socket(socket.AF_PACKET, kind, socket.htons(ETH_P_ALL))
        self.inside.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.inside.bind(("eth0", ETH_P_ALL))
        self.mac: bytes = self.inside.getsockname()[4]

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.node.close()
        self.inside.close()

    def ends(self, family: int, source: str | None = None, source_port: int = 20000) -> frames.Ends:
        """From the node (or `source`) to the pod."""
        own = self.pod.ipv4 if family == 4 else self.pod.ipv6
        node = "198.18.0.1" if family == 4 else "fd00:18::1"
        return frames.Ends(
            frames.address(source or node), frames.address(own), self.mac, source_port
        )

    def inject(self, sent: Sequence[bytes], protocol: int | None = None) -> Seen:
        """Send frames at the host's end. protocol: the sll_protocol, possibly a wrong one."""
        for frame in sent:
            send(self.node, frame, None if protocol is None else (self.pod.interface, protocol))
        return self.flush()

    def flush(self) -> Seen:
        """Packets seen at the pod since the last call. `TimeoutError` if the wire is dead."""
        sentinel = frames.arp(self.ends(4), operation=next(_sentinels))
        self.node.send(sentinel)
        arrived: list[bytes] = []
        sent: list[bytes] = []
        for frame, is_outgoing in self._frames():
            if frame == sentinel:
                return Seen(tuple(arrived), tuple(sent))
            if is_outgoing:
                sent.append(frame)
            elif frame[6:12] == frames.INJECTOR_MAC:
                arrived.append(frame)
        raise AssertionError("unreachable")

    def warm_up(self) -> None:
        """Make the pod learn the host's link-layer address, so that it answers at once."""
        for family, node in ((socket.AF_INET, "198.18.0.1"), (socket.AF_INET6, "fd00:18::1")):
            with self.pod.open_socket(family, socket.SOCK_STREAM) as sock:
                sock.connect_ex((node, 9))
        self.flush()

    def _frames(self) -> Iterator[tuple[bytes, bool]]:
        while True:
            frame, (_, _, kind, *_) = self.inside.recvfrom(1 << 16)
            yield frame, kind == _PACKET_OUTGOING


def send(sock: socket.socket, frame: bytes, target: tuple[str, int] | None = None) -> None:
    """Send by a packet socket, which gets ENOBUFS when a tc program drops the frame."""
    try:
        sock.send(frame) if target is None else sock.sendto(frame, target)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise


def _is_syn_ack(frame: bytes, ends: frames.Ends) -> bool:
    (ethertype,) = struct.unpack_from("!H", frame, 12)
    offset = {frames.ETHERTYPE_IPV4: 34, frames.ETHERTYPE_IPV6: 54}.get(ethertype)
    if offset is None or len(frame) < offset + 14 or frame[23 if offset == 34 else 20] != 6:
        return False
    own, peer = struct.unpack_from("!HH", frame, offset)
    flags = frame[offset + 13]
    both = frames.SYN | frames.ACK
    return (own, peer) == (ends.port, ends.source_port) and flags & both == both

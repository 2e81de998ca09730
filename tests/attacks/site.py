"""Where an attack takes place: a pod, its neighbour, and the ways from the node to the pod.

Nothing waits by the clock. All packets of an attack are sent, routed and received on one CPU, in
the order in which they were queued there. So once some datagrams of the neighbour have come to the
pod, one after the other, everything that was sent before has come, too, unless it was dropped.
"""

import contextlib
import dataclasses
import errno
import itertools
import socket
from collections.abc import Callable, Iterator

from agent.lab import lab as labs
from agent.lab.lab import Lab, LabPod
from tests.attacks.rights import Rights, held
from tests.kernel import frames, links, syns, traffic
from tests.kernel.syns import Target

MARKER_PORT = 9
_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_FRAME_BYTES = 1 << 17
# Each is queued twice at least: what was sent before may be queued six times.
_MARKERS = 3
_FIRST_PORT = 10_000
NOT_OFFERED = (errno.EPROTONOSUPPORT, errno.ENOSYS, errno.ESOCKTNOSUPPORT)
"""Errors of sockets that the kernel lacks."""

Shows = Callable[[bytes], bool] | bool
"""Whether a frame that reached the pod is the attacker's; or whether one of those that the attack
has taken from `Site.arrived` is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """By which what a process sends leaves the node, or seems to, and comes in again.

    device: the interface by which it is sent; mac: of the next hop, b"" where there are no
    Ethernet headers; turn: has done what another machine does that sends it back.
    """

    name: str
    device: str
    mac: bytes
    turn: Callable[[], None] = lambda: None

    @property
    def is_bare(self) -> bool:
        return not self.mac

    def send(self, frame: bytes) -> None:
        """Send an Ethernet frame by a packet socket; a program that drops it is no error."""
        with links.drop_is_enobufs(), socket.socket(socket.AF_PACKET, self._kind, 0) as sock:
            if self.is_bare:
                sock.sendto(frame[14:], (self.device, int.from_bytes(frame[12:14], "big")))
            else:
                sock.bind((self.device, 0))
                sock.send(frame)

    @property
    def _kind(self) -> int:
        return socket.SOCK_DGRAM if self.is_bare else socket.SOCK_RAW


class Site:
    """See the module. A test has one at a time."""

    def __init__(self, lab: Lab, pod: LabPod, neighbour: LabPod, ways: tuple[Way, ...]) -> None:
        """Returns when both pods and the node have found each other."""
        self.lab = lab
        self.pod = pod
        self.neighbour = neighbour
        self.ways = ways
        self.others: list[LabPod] = []
        """Pods in off, which forward."""
        self.interface = labs.BRIDGE if pod.is_bridged else pod.interface
        """Of the node, towards the pod."""
        self._ports = itertools.count(_FIRST_PORT)
        self._markers = itertools.count()
        # At the node's end of the pod's interface, behind the gate: a socket of the pod's own that
        # may wait for answers would prolong its grace period.
        self._tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._tap.settimeout(traffic.LIMIT_SECONDS)
        self._tap.bind((pod.interface, _ETH_P_ALL))
        self._from_neighbour = neighbour.open_socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.mac = mac_inside(pod, "eth0")
        self.port = 0
        """Of the current attack, at the pod. No other attack has it."""

    def close(self) -> None:
        self._tap.close()
        self._from_neighbour.close()

    def address(self, version: int) -> str:
        return traffic.address(self.pod, version)

    def next_port(self) -> int:
        self.port = next(self._ports)
        return self.port

    def target(self, version: int) -> Target:
        """Of a socket of the node's, at the attack's port."""
        return Target(self.address(version), self.interface, self.port, self.port)

    def ends(self, version: int, source: str, mac: bytes | None = None) -> frames.Ends:
        """For packets that are written by hand: from `source` to the attack's port of the pod."""
        pod = frames.address(self.address(version))
        to = self.mac if mac is None else mac or bytes(6)
        return frames.Ends(frames.address(source), pod, to, 31000, self.port)

    def from_stranger(self, version: int, mac: bytes | None = None) -> frames.Ends:
        """As `ends`, from an address that nothing has."""
        return self.ends(version, syns.STRANGER[version], mac)

    def arrived(self) -> list[bytes]:
        """Frames that reached the pod since the last call."""
        for way in self.ways:
            way.turn()
        seen: list[bytes] = []
        for _ in range(_MARKERS):
            marker = b"podgate-marker-%d" % next(self._markers)
            self._from_neighbour.sendto(marker, (self.pod.ipv4, MARKER_PORT))
            seen += self._up_to(marker)
        return seen

    def _up_to(self, marker: bytes) -> Iterator[bytes]:
        while True:
            frame, (_, _, kind, *_) = self._tap.recvfrom(_FRAME_BYTES)
            if kind != _PACKET_OUTGOING:
                continue
            if marker in frame:
                return
            yield frame


def mac_inside(pod: LabPod, interface: str) -> bytes:
    """Of one of the pod's own interfaces."""
    with pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as inside:
        inside.bind((interface, 0))
        return bytes(inside.getsockname()[4])


def contains(data: bytes) -> Callable[[bytes], bool]:
    """A frame with these bytes anywhere."""
    return lambda frame: data in frame


def to_port(port: int) -> Callable[[bytes], bool]:
    """A TCP segment or a datagram to this port, behind any extension headers of IPv6."""

    def shows(frame: bytes) -> bool:
        protocol, offset = _transport(frame)
        is_known = protocol in (frames.TCP, frames.UDP)
        return is_known and frame[offset + 2 : offset + 4] == port.to_bytes(2, "big")

    return shows


def _transport(frame: bytes) -> tuple[int, int]:
    """The protocol and where its header begins; 0 for what is not IP."""
    ethertype = int.from_bytes(frame[12:14], "big")
    if ethertype == frames.ETHERTYPE_IPV4:
        return frame[23], 14 + (frame[14] & 15) * 4
    if ethertype != frames.ETHERTYPE_IPV6:
        return 0, 0
    protocol, offset = frame[20], 54
    while protocol in (frames.HOPOPTS, frames.DSTOPTS, frames.ROUTING, frames.FRAGMENT):
        length = 8 if protocol == frames.FRAGMENT else (frame[offset + 1] + 1) * 8
        protocol, offset = frame[offset], offset + length
    return protocol, offset


@contextlib.contextmanager
def attacker(rights: Rights) -> Iterator[None]:
    """The block is the attacker's. Where a call of it fails, the attack has failed, which is no
    error of the test; unless the kernel has no such sockets (`NOT_OFFERED`)."""
    try:
        with held(rights):
            yield
    except OSError as error:
        if error.errno in NOT_OFFERED:
            raise

"""Packets that the host sends to pods, captured at the host's end of their interfaces.

The kernel's taps see an outgoing packet after the gate (tc egress), so a captured packet is one
that reached the pod.
"""

import contextlib
import errno
import ipaddress
import json
import socket
import struct
import subprocess
from collections.abc import Iterable, Iterator

from agent.lab.lab import LabPod
from agent.linux import packets
from tests.kernel import frames

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_STATISTICS = 263, 6  # linux/socket.h, linux/if_packet.h
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 1 << 22
_READ_BYTES = 128

# Only what goes out: `ld pkttype; jeq OUTGOING; ret` (linux/filter.h, linux/if_packet.h).
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PACKET_TYPE = 0xFFFFF000 + 4
PACKET_OUTGOING = 4
_ONLY_OUTGOING: tuple[packets.Instruction, ...] = (
    (_LOAD_WORD, 0, 0, _PACKET_TYPE),
    (_JUMP_IF_EQUAL, 0, 1, PACKET_OUTGOING),
    (_RETURN, 0, 0, _READ_BYTES),
    (_RETURN, 0, 0, 0),
)

# Neighbour discovery (RFC 4861) and listener discovery (RFC 2710, 3810): the two ends of a link
# about that link. Without it no packet of another pod would arrive either.
_LINK_CONTROL = (*range(130, 138), 143)


class Capture:
    """Captures at these pods' interfaces the packets that are sent to the pods."""

    def __init__(self, pods: Iterable[LabPod]) -> None:
        self._taps = {pod.name: _tap(pod.interface) for pod in pods}

    def close(self) -> None:
        for tap in self._taps.values():
            tap.close()

    def seen(self, sources: Iterable[IPNetwork]) -> list[str]:
        """One line for each packet from `sources` since the last call, but for the link's own
        control: ARP, and neighbour and listener discovery.

        What has no source that can be read counts too. The agent's self-tests need not be left
        out: gates drop them. Fails when the kernel had to leave out packets.
        """
        networks = tuple(sources)
        found = []
        for name, tap in self._taps.items():
            for frame in _frames(tap):
                packet = Packet(frame)
                if packet.is_link_control:
                    continue
                if packet.source is None or any(packet.source in one for one in networks):
                    found.append(f"{packet} to {name}")
            statistics = tap.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
            assert struct.unpack("=II", statistics)[1] == 0, f"packets to {name} were lost"
        return found


@contextlib.contextmanager
def capture(pods: Iterable[LabPod]) -> Iterator[Capture]:
    made = Capture(pods)
    try:
        yield made
    finally:
        made.close()


def node_addresses() -> list[IPNetwork]:
    """Every address of every interface of the namespace that this process is in."""
    listed = subprocess.run(
        ["ip", "-json", "address", "show"], check=True, capture_output=True, text=True
    ).stdout
    return [
        ipaddress.ip_network(address["local"])
        for link in json.loads(listed)
        for address in link.get("addr_info", [])
    ]


class Packet:
    """From the first bytes of an Ethernet frame."""

    def __init__(self, frame: bytes) -> None:
        (self._ethertype,) = struct.unpack_from("!H", frame, 12)
        self._protocol, self._transport = 0, b""
        self.source: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
        if self._ethertype == frames.ETHERTYPE_IPV4:
            self._protocol = frame[23]
            self._transport = frame[14 + (frame[14] & 15) * 4 :]
            self.source = ipaddress.IPv4Address(frame[26:30])
        elif self._ethertype == frames.ETHERTYPE_IPV6:
            self._protocol, self._transport = frame[20], frame[54:]
            if self._protocol == frames.HOPOPTS:  # listener discovery comes behind it
                self._protocol = self._transport[0]
                self._transport = self._transport[(self._transport[1] + 1) * 8 :]
            self.source = ipaddress.IPv6Address(frame[22:38])

    @property
    def is_link_control(self) -> bool:
        if self._ethertype == frames.ETHERTYPE_ARP:
            return True
        return self._protocol == frames.ICMPV6 and self._transport[0] in _LINK_CONTROL

    def is_tcp_to(self, port: int) -> bool:
        return (
            self._protocol == frames.TCP and struct.unpack_from("!H", self._transport, 2)[0] == port
        )

    def __str__(self) -> str:
        what = f"protocol {self._protocol}"
        if self._protocol == frames.TCP:
            what = "TCP from port {} to port {}".format(*struct.unpack_from("!HH", self._transport))
        return f"{self.source}: ethertype {self._ethertype:#06x}, {what}"


def _tap(interface: str) -> socket.socket:
    # Without a protocol nothing is received before the filter is attached.
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    packets.attach_filter(tap, _ONLY_OUTGOING)
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    tap.bind((interface, _ETH_P_ALL))
    return tap


def _frames(tap: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            yield tap.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENETDOWN:  # reported once, when the interface is deleted
                raise

"""The relay's own sockets in its namespace: where openings are seen, sent again, and accepted."""

import collections
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from agent.relay import segments
from agent.relay.epoll import READABLE, Poller

_ETH_P_ALL = 0x0003
_SO_ATTACH_FILTER = 26
_SO_RCVBUFFORCE = 33
_IPV6_HDRINCL = 36
# 4096 openings at once: a skb of a SYN counts as less than 1 KiB.
_SEEN_BYTES = 4 << 20
_LONGEST_PACKET = 65536

# A pod with an http probe may be asked at any port, so their number has to end somewhere.
_MOST_PORTS = 1024
_BACKLOG = 4096


class Openings:
    """A packet socket that sees every SYN that comes by the pair, before it is dropped there."""

    def __init__(
        self,
        interface: str,
        poller: Poller,
        *,
        on_opening: Callable[[segments.Opening], None],
        on_gone: Callable[[], None],
    ) -> None:
        """on_gone: the interface was taken away."""
        self._socket = _packet_socket(interface)
        self._on_opening = on_opening
        self._on_gone = on_gone
        poller.watch(self._socket.fileno(), READABLE, self)

    def on_event(self, events: int) -> None:
        """One at a time: what else is there is told again, and others wait too."""
        try:
            packet = self._socket.recv(_LONGEST_PACKET)
        except BlockingIOError:
            return
        except OSError:  # ENETDOWN
            self._on_gone()
            return
        if opening := segments.read_opening(packet):
            self._on_opening(opening)


class Injector:
    """Sends packets as they are: openings again, to the relay itself by its loopback, where
    nothing drops them; refusals, to the node.
    """

    def __init__(self) -> None:
        self._ipv4 = socket.socket(socket.AF_INET, _RAW, socket.IPPROTO_RAW)
        self._ipv4.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
        if _FAMILY == socket.AF_INET6:
            self._ipv6 = socket.socket(socket.AF_INET6, _RAW, socket.IPPROTO_RAW)
            self._ipv6.setsockopt(socket.IPPROTO_IPV6, _IPV6_HDRINCL, 1)

    def open_again(self, opening: segments.Opening) -> None:
        """Raises `OSError`."""
        self._send(opening.packet, opening.local)

    def refuse(self, opening: segments.Opening) -> None:
        """Raises `OSError`."""
        self._send(segments.refusal(opening), opening.peer)

    def _send(self, packet: bytes, destination: bytes) -> None:
        if len(destination) == 4:
            self._ipv4.sendto(packet, (socket.inet_ntop(socket.AF_INET, destination), 0))
        else:
            self._ipv6.sendto(packet, (socket.inet_ntop(socket.AF_INET6, destination), 0))


class Arrivals(Protocol):
    """Who is told of what listeners accept."""

    def accepted(self, sock: socket.socket, flow: segments.Flow) -> None:
        """A connection is open; the socket is the receiver's."""

    def turned_away(self, flow: segments.Flow) -> None:
        """A connection was reset, because the process has no descriptor left for it."""


class Listeners:
    """One listening socket for each port that a pod has answered at, for all targets together.

    Nobody reaches one by himself: every SYN from the node is held until the pod has answered.
    """

    def __init__(self, poller: Poller, arrivals: Arrivals) -> None:
        self._poller = poller
        self._door = _Door(arrivals)
        self._by_port: collections.OrderedDict[int, Listener] = collections.OrderedDict()

    def prepare(self, port: int) -> "Listener":
        """Listen there if nobody does yet. Raises `OSError`."""
        if listener := self._by_port.get(port):
            self._by_port.move_to_end(port)
            return listener
        if len(self._by_port) >= _MOST_PORTS:
            _, oldest = self._by_port.popitem(last=False)
            oldest.close(self._poller)
        listener = self._by_port[port] = Listener(port, self._door)
        self._poller.watch(listener.fd, READABLE, listener)
        return listener


class Listener:
    """One listening socket, for both families."""

    def __init__(self, port: int, door: "_Door") -> None:
        self._door = door
        self._socket = socket.socket(_FAMILY, _STREAM)
        if _FAMILY == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # For what is accepted. Who sends decides what goes together, and has done so.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.bind(("", port))
        self._socket.listen(_BACKLOG)
        self.fd = self._socket.fileno()

    def close(self, poller: Poller) -> None:
        poller.forget(self.fd)
        self._socket.close()

    def on_event(self, events: int) -> None:
        """Accept all that is there."""
        while self.accept():
            pass

    def accept(self) -> bool:
        """Accept one; whether there was one."""
        return self._door.accept(self._socket)


class _Door:
    """Accepts. A descriptor is kept in reserve: what cannot be accepted would be told of for ever,
    and so it is accepted with that one, and reset.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._reserve = _open_nothing()

    def accept(self, listening: socket.socket) -> bool:
        try:
            sock, peer = listening.accept()
        except OSError as error:
            return error.errno in _NO_DESCRIPTOR and self._turn_away(listening)
        sock.setblocking(False)
        if flow := _flow(sock, peer):
            self._arrivals.accepted(sock, flow)
        else:
            sock.close()
        return True

    def _turn_away(self, listening: socket.socket) -> bool:
        os.close(self._reserve)
        try:
            sock, peer = listening.accept()
            flow = _flow(sock, peer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, segments.RESET_ON_CLOSE)
            sock.close()
        except OSError:
            return False
        finally:
            self._reserve = _open_nothing()
        if flow:
            self._arrivals.turned_away(flow)
        return True


def _open_nothing() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _flow(sock: socket.socket, peer: tuple[str, int]) -> segments.Flow | None:
    """None where it has been reset already."""
    try:
        local = sock.getsockname()
    except OSError:
        return None
    return _pack(peer[0]), peer[1], _pack(local[0]), local[1]


def _listening_family() -> int:
    """What listens for both families; a kernel may be without IPv6 (ipv6.disable=1)."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return socket.AF_INET
    return socket.AF_INET6


_RAW = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_STREAM = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
_FAMILY = _listening_family()
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_MAPPED = bytes(10) + b"\xff\xff"


def _pack(text: str) -> bytes:
    """4 bytes for an IPv4 address, also for a mapped one (RFC 4291, 2.5.5.2)."""
    if ":" not in text:
        return socket.inet_aton(text)
    packed = socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    return packed[12:] if packed.startswith(_MAPPED) else packed


def _packet_socket(interface: str) -> socket.socket:
    """For all protocols: one for IP alone comes after the programs at tc ingress, and what they
    drop it never sees (__netif_receive_skb_core). Bound to none until its filter stands.
    """
    sock = socket.socket(
        socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0
    )
    lines = b"".join(struct.pack("HBBI", *line) for line in segments.SYN_FILTER)
    text = ctypes.create_string_buffer(lines, len(lines))
    sock.setsockopt(
        socket.SOL_SOCKET,
        _SO_ATTACH_FILTER,
        struct.pack("HxxxxxxP", len(segments.SYN_FILTER), ctypes.addressof(text)),
    )
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SEEN_BYTES)
    sock.bind((interface, _ETH_P_ALL))
    return sock

"""The relay's own sockets in its namespace: they capture SYNs, inject them, and accept them."""

import collections
import errno
import os
import socket
from collections.abc import Callable
from typing import Protocol

from agent.linux import packets
from agent.relay import segments
from agent.relay.epoll import READABLE, EpollPoller
from agent.relay.segments import Flow, Syn
from probes.netns import BareSocket

_ETH_P_ALL = 0x0003
_SO_RCVBUFFORCE = 33
_IPV6_HDRINCL = 36
# 4096 SYNs at once: the skb of a SYN counts as less than 1 KiB.
_CAPTURE_BUFFER_BYTES = 4 << 20
_MAX_PACKET_BYTES = 65536

# The kubelet may connect to any port of a pod with an http probe, so the number of listeners needs
# a limit.
_MAX_PORTS = 1024
_BACKLOG = 4096


class SynCapture:
    """A packet socket that receives every SYN from the pair, before it is dropped there."""

    def __init__(
        self,
        interface: str,
        poller: EpollPoller,
        *,
        on_syn: Callable[[Syn], None],
        on_removed: Callable[[], None],
    ) -> None:
        """on_removed: the interface was removed."""
        self._socket = _packet_socket(interface)
        self._on_syn = on_syn
        self._on_removed = on_removed
        poller.register(self._socket.fileno(), READABLE, self)

    def on_event(self, events: int) -> None:
        """Handle one packet: epoll reports the others again, after the other descriptors."""
        try:
            packet = self._socket.recv(_MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:  # ENETDOWN
            self._on_removed()
            return
        if syn := segments.parse_syn(packet):
            self._on_syn(syn)


class SynInjector:
    """Sends raw packets: held SYNs to the relay itself, through its loopback, where no program
    drops them; resets to the host.
    """

    def __init__(self) -> None:
        self._ipv4 = socket.socket(socket.AF_INET, _RAW, socket.IPPROTO_RAW)
        self._ipv4.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
        if _FAMILY == socket.AF_INET6:
            self._ipv6 = socket.socket(socket.AF_INET6, _RAW, socket.IPPROTO_RAW)
            self._ipv6.setsockopt(socket.IPPROTO_IPV6, _IPV6_HDRINCL, 1)

    def reinject(self, syn: Syn) -> None:
        """Raises `OSError`."""
        self._send(syn.packet, syn.local)

    def send_reset(self, syn: Syn) -> None:
        """Raises `OSError`."""
        self._send(segments.reset_for(syn), syn.peer)

    def _send(self, packet: bytes, destination: bytes) -> None:
        if len(destination) == 4:
            self._ipv4.sendto(packet, (socket.inet_ntop(socket.AF_INET, destination), 0))
        else:
            self._ipv6.sendto(packet, (socket.inet_ntop(socket.AF_INET6, destination), 0))


class AcceptHandler(Protocol):
    """Handles what the listeners accept."""

    def on_accepted(self, sock: BareSocket, flow: Flow) -> None:
        """A connection is open; the handler owns the socket."""

    def on_rejected(self, flow: Flow) -> None:
        """A connection was reset, because the process has no descriptor left for it."""


class PortListeners:
    """One listening socket for each port at which a pod has responded, shared by all targets.

    Connections reach them only through `HeldSyns`: every SYN from the host is held until the pod
    has responded.
    """

    def __init__(self, poller: EpollPoller, handler: AcceptHandler) -> None:
        self._poller = poller
        self._router = _AcceptRouter(handler)
        self._by_port: collections.OrderedDict[int, PortListener] = collections.OrderedDict()

    def prepare(self, port: int) -> "PortListener":
        """The port's listener, created if there is none. Raises `OSError`."""
        if listener := self._by_port.get(port):
            self._by_port.move_to_end(port)
            return listener
        if len(self._by_port) >= _MAX_PORTS:
            _, oldest = self._by_port.popitem(last=False)
            oldest.close(self._poller)
        listener = self._by_port[port] = PortListener(port, self._router)
        self._poller.register(listener.fd, READABLE, listener)
        return listener


class PortListener:
    """One listening socket, for both families."""

    def __init__(self, port: int, router: "_AcceptRouter") -> None:
        self._router = router
        self._socket = socket.socket(_FAMILY, _STREAM)
        if _FAMILY == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted sockets. The pod has already decided which data to send together.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.bind(("", port))
        self._socket.listen(_BACKLOG)
        self.fd = self._socket.fileno()

    def close(self, poller: EpollPoller) -> None:
        poller.unregister(self.fd)
        self._socket.close()

    def on_event(self, events: int) -> None:
        """Accept all connections of the backlog."""
        while self.accept():
            pass

    def accept(self) -> bool:
        """Accept one connection; False if there was none."""
        return self._router.accept(self._socket)


class _AcceptRouter:
    """Accepts connections and passes them to the handler.

    It keeps one descriptor in reserve. Without a free descriptor, accept fails and epoll reports
    the connection again and again; with the reserve it is accepted, and reset.
    """

    def __init__(self, handler: AcceptHandler) -> None:
        self._handler = handler
        self._reserve = _open_null()

    def accept(self, listening: socket.socket) -> bool:
        try:
            sock, peer = _accept(listening)
        except OSError as error:
            return error.errno in _NO_DESCRIPTOR and self._reject(listening)
        if flow := _flow(sock, peer):
            self._handler.on_accepted(sock, flow)
        else:
            sock.close()
        return True

    def _reject(self, listening: socket.socket) -> bool:
        os.close(self._reserve)
        try:
            sock, peer = _accept(listening)
            flow = _flow(sock, peer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, segments.RESET_ON_CLOSE)
            sock.close()
        except OSError:
            return False
        finally:
            self._reserve = _open_null()
        if flow:
            self._handler.on_rejected(flow)
        return True


def _accept(listening: socket.socket) -> tuple[BareSocket, tuple[str, int]]:
    """As socket.accept, without what Python's class adds. The accepted socket is blocking, so each
    call on it needs MSG_DONTWAIT; to make it non-blocking would be one call more."""
    descriptor, peer = listening._accept()  # type: ignore[attr-defined]  # of the class below
    return BareSocket(_FAMILY, socket.SOCK_STREAM, 0, descriptor), peer


def _open_null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _flow(sock: BareSocket, peer: tuple[str, int]) -> Flow | None:
    """None for a connection that is already reset."""
    try:
        local = sock.getsockname()
    except OSError:
        return None
    return _pack(peer[0]), peer[1], _pack(local[0]), local[1]


def _listening_family() -> int:
    """IPv6, whose sockets accept both families; IPv4 if the kernel has no IPv6 (ipv6.disable=1)."""
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
    """4 bytes for an IPv4 address, mapped or not (RFC 4291, 2.5.5.2)."""
    if ":" not in text:
        return socket.inet_aton(text)
    packed = socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    return packed[12:] if packed.startswith(_MAPPED) else packed


def _packet_socket(interface: str) -> socket.socket:
    """For all protocols: a socket for IP alone comes after the programs at tc ingress, and does not
    receive what they drop (__netif_receive_skb_core). It is bound after its filter is attached.
    """
    sock = socket.socket(
        socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0
    )
    packets.attach_filter(sock, segments.SYN_FILTER)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _CAPTURE_BUFFER_BYTES)
    sock.bind((interface, _ETH_P_ALL))
    return sock

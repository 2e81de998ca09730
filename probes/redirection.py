"""Who accepts a connection from inside a pod: the server at the dialled port, or a mesh's proxy; or
none, where the pod's own firewall drops it.

Rules inside the pod (iptables or nft, OUTPUT) may redirect the pod's own connections to a proxy,
and those of podgate with them, where they do not exempt the loopback (Consul). The proxy accepts
whether the application runs or not, and may reject what the application would answer.

Tried on Linux 6.18 with REDIRECT and DNAT of both: the dialling socket shows the dialled address,
and so does its SO_ORIGINAL_DST. The accepted socket shows the other port: it is at 127.0.0.1 or ::1
and the proxy's port (DNAT: the rule's address), connected to the dialling socket's own end. An
exact lookup by sock_diag takes 33 us with its netlink socket, and finds no such pair; the list of
connections does, in 0.5 ms or more. With TPROXY the accepted socket is at the dialled address and
port, and inherits IP_TRANSPARENT from the proxy's. Of a connection that DNAT leads out of the pod,
no other end is in the pod.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from probes import listening, meshes, sock_diag
from probes.netns import BareSocket, Netns, NetnsGoneError, connect_inside
from probes.sock_diag import InetSocket, SockDiag

_UNUSED_PORTS = range(9650, 9653)
"""Any would do; the next one is for a pod with a server at the first."""

# Rules of a pod may change at any time; a lookup in 10 s is no cost.
_TRUSTED_SECONDS = 10.0
_ACCEPTORS_MAX = 10_000  # of ended pods, too; all is looked up again then
_RESET_ON_CLOSE = struct.pack("=ii", 1, 0)  # struct linger
_TCP = socket.IPPROTO_TCP
_TCP_ESTABLISHED = 1  # include/net/tcp_states.h
_DIALLED = 8  # of a pod's servers, where rules drop what comes from inside
_ANSWER_SECONDS = 0.25  # microseconds by the loopback, if the CPU is not taken by others


@dataclasses.dataclass(frozen=True, slots=True)
class Redirection:
    """A process that accepts instead of the dialled one.

    port: where it listens, 0 for one in another network namespace; user: its user id, 0 also if
    that is not found; mesh: its name, or empty.
    """

    port: int
    user: int
    mesh: str = ""

    @property
    def text(self) -> str:
        """A clause."""
        if not self.port:
            return "redirected out of the pod"
        who = f"{self.mesh}, user {self.user}" if self.mesh else f"user {self.user}"
        return f"redirected to port {self.port} ({who})"

    @property
    def sentence(self) -> str:
        """The message of a probe that was redirected."""
        text = self.text
        return f"{text[:1].upper()}{text[1:]}, which shows nothing of the application."


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """Rules of the pod drop connections from inside: its OUTPUT admits no new ones, or its INPUT
    none by the loopback. Connections from the node may pass: they come by another interface."""

    port: int
    """At which a server listens."""

    @property
    def text(self) -> str:
        """A clause."""
        return f"dropped by rules in the pod (port {self.port})"


@dataclasses.dataclass(frozen=True, slots=True)
class InnerWay:
    """Connections from inside a pod to one of its addresses do not reach the server. user: whose
    do; None if podgate knows none."""

    redirection: Redirection | Dropped
    user: int | None


InnerWays = Mapping[str, InnerWay]
"""By address; those at which connections reach the server are left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class InnerTries:
    """What connections from inside a pod to an unused port have found.

    ways: of the addresses that are redirected; silent: addresses at which root's connection was
    neither accepted nor rejected within the call, as by the loopback all are, unless the machine is
    busy or rules drop it.
    """

    ways: dict[str, InnerWay]
    silent: list[str]


def find_acceptor(netns: Netns, sock: BareSocket) -> Redirection | None:
    """Who has accepted this connection of the pod to itself, if not a server of the dialled port.

    None also if that cannot be found out: the other end has closed, or the pod's rules replace the
    source as well. Raises `NetnsGoneError`, and `OSError` where the kernel has no inet_diag.
    """
    return _examine(netns, sock)[0]


def _examine(netns: Netns, sock: BareSocket) -> tuple[Redirection | None, bool]:
    """As `find_acceptor`, and whether a server of the dialled port certainly has accepted."""
    dialled, own = _endpoint(sock.getpeername()), _endpoint(sock.getsockname())
    with SockDiag.open_in(netns) as diag:
        is_found = diag.connection(_TCP, dialled, own) is not None
        listeners = _listed(diag, sock_diag.LISTEN)
        if is_found:
            port = _transparent_port(listeners, dialled[1])
            if port is None or not _is_transparent(diag, sock, dialled, own):
                return None, True
        else:
            port = _other_port(diag, own)
            if port is None and _is_outside(diag, sock, dialled, own, listeners):
                return Redirection(0, 0), False
            if port is None or port == dialled[1]:
                return None, False
    users = {found.local_port: found.user for found in listeners}
    return Redirection(port, users.get(port, 0), meshes.name(users.keys())), False


def find_catch_all(netns: Netns, address: str, user: int = 0) -> Redirection | None:
    """Who accepts connections of this user to a port of the address at which nothing listens.

    None if it is rejected, as it should be: takes 25 us. Raises as `find_acceptor`.
    """
    return _try_unused(netns, address, user)[0]


def _try_unused(netns: Netns, address: str, user: int = 0) -> tuple[Redirection | None, bool]:
    """As `find_catch_all`, and whether the connection is still pending."""
    for port in _UNUSED_PORTS:
        sock, result = _dial(netns, address, port, user)
        try:
            if result:
                return None, result == errno.EALREADY
            if found := find_acceptor(netns, sock):
                return found, False
        finally:
            sock.close()
    return None, False


def find_inner_ways(netns: Netns, addresses: Iterable[str], before: InnerWays) -> InnerTries:
    """Which of the pod's addresses are redirected or silent, by one connection to each. before: the
    last result; where its user still is exempt, the proxy is not dialled again. Raises as
    `find_acceptor`."""
    found = InnerTries({}, [])
    others = []
    for address in addresses:
        previous = before.get(address)
        if previous and previous.user and find_catch_all(netns, address, previous.user) is None:
            found.ways[address] = previous
        else:
            others.append(address)
    for address, result in _dial_unused(netns, others):
        if result == errno.EALREADY:
            found.silent.append(address)
        if result:
            continue
        # Accepted by a proxy, or by a server of that port.
        redirection, is_pending = _try_unused(netns, address)
        if redirection is not None:
            user = redirection.user or None
            if user and find_catch_all(netns, address, user) is not None:
                user = None
            found.ways[address] = InnerWay(redirection, user)
        elif is_pending:
            found.silent.append(address)
    return found


def _dial_unused(netns: Netns, addresses: Sequence[str]) -> list[tuple[str, int]]:
    """The result of root's connect to an unused port of each address; nothing stays open."""
    if not addresses:
        return []
    sockets = netns.bare_sockets(list(map(_family, addresses)), socket.SOCK_STREAM)
    try:
        results = []
        for address, sock in zip(addresses, sockets, strict=True):
            result = connect_inside(sock, (address, _UNUSED_PORTS[0]))
            if not result:
                _reset_on_close(sock)
            results.append((address, result))
        return results
    finally:
        for sock in sockets:
            sock.close()


def find_dropped(netns: Netns, addresses: Iterable[str]) -> dict[str, InnerWay]:
    """To which of these addresses of a pod connections from inside are dropped, though a server
    listens there. Waits for a quarter of a second where they are. Raises as `find_acceptor`.

    A port at which nothing listens decides first, so a server is not dialled without need; rules
    may admit its port alone.
    """
    found = {}
    for address in addresses:
        if not _unanswered(netns, address, _UNUSED_PORTS[:1]):
            continue
        servers = {one.port for one in listening.listeners(netns) if one.accepts(address)}
        if dropped := _unanswered(netns, address, sorted(servers)[:_DIALLED]):
            found[address] = InnerWay(Dropped(dropped[0]), None)
    return found


def _unanswered(netns: Netns, address: str, ports: Iterable[int]) -> list[int]:
    """Those at which nothing answers within `_ANSWER_SECONDS`."""
    pending = {}
    with contextlib.ExitStack() as undo:
        poll = select.poll()
        for port in ports:
            sock, result = _dial(netns, address, port)
            undo.callback(sock.close)
            if result == errno.EALREADY:
                poll.register(sock, select.POLLOUT)
                pending[sock.fileno()] = port
        until = time.monotonic() + _ANSWER_SECONDS
        while pending and (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                del pending[descriptor]
    return sorted(pending.values())


def _dial(netns: Netns, address: str, port: int, user: int = 0) -> tuple[BareSocket, int]:
    """A socket that is reset when it is closed, and the result of its first connect."""
    sock = netns.bare_socket(_family(address), socket.SOCK_STREAM, user)
    _reset_on_close(sock)
    return sock, connect_inside(sock, (address, port))


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _reset_on_close(sock: BareSocket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


class Acceptor:
    """Who accepts at one port of one address of a pod, as far as that was looked up.

    A lookup is due for the first connection, after each failure, and every 10 s.
    """

    __slots__ = (
        "_address",
        "_is_direct",
        "_looked_up_for",
        "_netns",
        "_now",
        "_retry_at",
        "_until",
        "user",
        "way",
    )

    def __init__(self, netns: Netns, address: str, now: Callable[[], float]) -> None:
        self.user = 0
        """Whose sockets are to connect."""
        self.way: InnerWay | None = None
        """None while connections of root are not redirected, as far as that is known."""
        self._is_direct = False
        self._netns = netns
        self._address = address
        self._now = now
        self._looked_up_for = 0
        """The user whose connections are not redirected until then."""
        self._until = 0.0
        self._retry_at = 0.0
        """From when the proxy's user is tried again, which was redirected, too."""

    @property
    def is_direct(self) -> bool:
        """Whether root's connections certainly get to a server of the dialled port, and not by a
        redirection within the pod either, since the last doubt."""
        return self._is_direct and self.user == 0 and self.way is None and self._until > 0

    def is_due(self, user: int) -> bool:
        """Whether a connection that this user has opened is to be looked up."""
        return user != self._looked_up_for or self._now() >= self._until

    def look_up(self, user: int, sock: BareSocket) -> Redirection | None:
        """Who has accepted instead of the dialled port. Then `user` may be another one, whose next
        connection may not be redirected."""
        try:
            redirection, self._is_direct = _find_proxy(self._netns, self._address, user, sock)
        except (NetnsGoneError, OSError):
            return None
        now = self._now()
        self._until = 0.0
        if redirection is None:
            self.user = self._looked_up_for = user
            self._until = now + _TRUSTED_SECONDS
            self._note_exempt(user)
            return None
        self.way = InnerWay(redirection, None)
        if user:
            self.user, self._retry_at = 0, now + _TRUSTED_SECONDS
        elif now >= self._retry_at:
            self.user = redirection.user
        return redirection

    def note_rejection(self, user: int) -> None:
        """A connection of this user was rejected, so no proxy has accepted it."""
        self._note_exempt(user)

    def _note_exempt(self, user: int) -> None:
        """Connections of this user are not redirected; root's neither, if it is root's."""
        if not user:
            self.way = None
        elif self.way is not None:
            self.way = InnerWay(self.way.redirection, user)

    def doubt(self) -> None:
        """A probe has failed: the next connection is looked up."""
        self._until = 0.0


class Acceptors:
    """Those of all probes, by namespace, address and port."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: dict[tuple[Netns, str], dict[int, Acceptor]] = {}
        self._count = 0

    def of(self, netns: Netns, address: str, port: int) -> Acceptor:
        ports = self._found.get((netns, address), {})
        found = ports.get(port)
        if found is None:
            if self._count >= _ACCEPTORS_MAX:
                self._found.clear()
                self._count = 0
            found = Acceptor(netns, address, self._now)
            self._found.setdefault((netns, address), {})[port] = found
            self._count += 1
        return found

    def is_direct(self, netns: Netns, address: str, port: int) -> bool:
        """As of the port's `Acceptor`."""
        return self.of(netns, address, port).is_direct

    def doubt(self, netns: Netns | None = None) -> None:
        """Rules of this pod, or of some pod, have changed: next connections are looked up."""
        for (of, _), ports in self._found.items():
            if netns is None or of == netns:
                for acceptor in ports.values():
                    acceptor.doubt()

    def ways(self, netns: Netns, addresses: Iterable[str]) -> dict[str, InnerWay]:
        """To these addresses, of one port each that is redirected, if a probe has found any: a port
        for which no user is exempt comes first."""
        found = {}
        for address in addresses:
            acceptors = self._found.get((netns, address), {}).values()
            ways = [acceptor.way for acceptor in acceptors if acceptor.way is not None]
            if ways:
                found[address] = min(ways, key=lambda way: way.user is not None)
        return found


def _find_proxy(
    netns: Netns, address: str, user: int, sock: BareSocket
) -> tuple[Redirection | None, bool]:
    """As `_examine`. A pod may redirect a port of its own to another, such as 80 to 8080: then
    the server is the application. A proxy gets all ports, or listens where meshes' proxies do, or
    in another network namespace."""
    found, is_direct = _examine(netns, sock)
    if found is None or not found.port or found.port in meshes.PROXY_PORTS:
        return found, is_direct
    return (found if find_catch_all(netns, address, user) is not None else None), False


def _other_port(diag: SockDiag, own: sock_diag.Endpoint) -> int | None:
    """The port of the socket that is connected to this one, and to which this one is not."""
    states = sock_diag.ANY_STATE & ~sock_diag.LISTEN
    for found in _listed(diag, states, {_as_ipv6(own[0])}, remote_port=own[1]):
        local = ipaddress.IPv6Address(found.local)
        end = (local.ipv4_mapped or local, found.local_port)
        # Two connections to different servers may have the same port at the client.
        if diag.connection(_TCP, own, end) is None:
            return found.local_port
    return None


def _transparent_port(listeners: Iterable[InetSocket], dialled: int) -> int | None:
    """Where a proxy listens to which TPROXY has led a connection; None if its server is at the
    dialled port."""
    ports = [found.local_port for found in listeners if found.is_transparent]
    if not ports or dialled in ports:
        return None
    return next((port for port in ports if port in meshes.PROXY_PORTS), ports[0])


def _is_transparent(
    diag: SockDiag, sock: BareSocket, dialled: sock_diag.Endpoint, own: sock_diag.Endpoint
) -> bool:
    """Whether a transparent listener has accepted."""
    _finish_handshake(sock)
    accepted = diag.connection(_TCP, dialled, own)
    return accepted is not None and accepted.is_transparent


def _is_outside(
    diag: SockDiag,
    sock: BareSocket,
    dialled: sock_diag.Endpoint,
    own: sock_diag.Endpoint,
    listeners: Iterable[InetSocket],
) -> bool:
    """Whether a connection of which the pod has no other end is open all the same.

    While a listener's queue is full, one that was opened by a SYN cookie has none. A connection to
    the dialled endpoint from somewhere else may be this one, with a source that rules replace.
    """
    _finish_handshake(sock)
    if diag.connection(_TCP, dialled, own) is not None or _other_port(diag, own) is not None:
        return False
    address, port = dialled
    if any(found.is_full for found in listeners if found.local_port == port):
        return False
    states = sock_diag.ANY_STATE & ~sock_diag.LISTEN
    connected = _listed(diag, states, port=port)
    if any(found.local == _as_ipv6(address) for found in connected):
        return False
    return sock.getsockopt(_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED


def _finish_handshake(sock: BareSocket) -> None:
    """Send its last packet, which otherwise goes with the first data. Until then the other end is
    a request at most, and none with a SYN cookie."""
    sock.setsockopt(_TCP, socket.TCP_QUICKACK, 1)


def _listed(
    diag: SockDiag,
    states: int,
    remotes: set[bytes] | None = None,
    *,
    port: int = 0,
    remote_port: int = 0,
) -> list[InetSocket]:
    found: list[InetSocket] = []
    for family in sock_diag.FAMILIES:
        try:
            found += diag.sockets(
                _TCP, states, remotes, families=(family,), port=port, remote_port=remote_port
            )
        except OSError as error:
            if error.errno != errno.ENOENT:  # a kernel without IPv6
                raise
    return found


def _endpoint(address: tuple[str, int]) -> sock_diag.Endpoint:
    return ipaddress.ip_address(address[0]), address[1]


def _as_ipv6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    if address.version == 6:
        return address.packed
    return ipaddress.IPv6Address(f"::ffff:{address}").packed

"""Sockets for exchanges: connects inside the pod, moves bytes both ways, closes.

One loop runs all probes, and this module is most of a probe's cost, so it works on bare sockets: no
streams, and no task or future per probe.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable

from probes.netns import SHORTAGES, BareSocket, Netns, NetnsGoneError, connect_inside
from probes.protocols import client_certificates, tls
from probes.protocols.exchanges import ConnectionFailure, DialHop, Exchange, Phase, join_host_port
from probes.redirection import Acceptor, Acceptors, Redirection
from probes.results import ExchangeResult, ProbeResult

RECEIVED_MAX_BYTES = 512 * 1024
"""Maximum that a pod may send in one probe, redirects included: limits the time spent on a flood.
"""

_RECEIVE_BYTES = 16 * 1024  # a probe's answer is mostly one piece of a few hundred bytes
_EVENTS_MAX = 256

# pkg/probe/dialer_others.go:36 sets SO_LINGER to one second, against TIME-WAIT. On Linux that
# only makes close() wait for the pod to acknowledge the end, even on a non-blocking socket:
# fine in a goroutine of its own, but here a pod that drops such packets would hold up the
# probes of all others. See _finish for what is done instead.
# tcp(7): the handshake's last acknowledgement waits for what is sent next, the request or the end,
# and goes along with it. A probe is a packet less, and the pod's server is woken once, not twice.
_QUICKACK_OFF = 0
_TCP_REPAIR = 19  # linux/tcp.h
# IP_MINTTL of linux/in.h, IPV6_MINHOPCOUNT of linux/in6.h
_HOPS_LEFT_MIN = {
    int(socket.AF_INET): (socket.IPPROTO_IP, 21),
    int(socket.AF_INET6): (socket.IPPROTO_IPV6, 73),
}
_HOPS_MAX = 255
# EIO of a TCP socket is never the peer's doing.
_OWN_ERRORS = SHORTAGES | {errno.EIO}


class LoopPoller:
    """An epoll inside the loop's.

    asyncio's add_reader and remove_reader cost several microseconds each; here registering a socket
    costs one, and a burst of ready sockets is one wake-up of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, descriptor: int, events: int, ready: Callable[[], None]) -> None:
        """Call `ready` on each of `events`, until the descriptor is forgotten."""
        self._epoll.register(descriptor, events)
        self._watched[descriptor] = ready

    def change(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """Stop watching; close the descriptor next, which ends the kernel's watch as well."""
        del self._watched[descriptor]

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _ready(self) -> None:
        for descriptor, _ in self._epoll.poll(0, _EVENTS_MAX):
            # It may have been forgotten by a callback of this batch. If the descriptor is already
            # in use again, its attempt gets an event of the old socket, and reads EAGAIN.
            if ready := self._watched.get(descriptor):
                ready()


class DialAttempt:
    """One exchange with one address of the pod, over as many connections as it needs."""

    __slots__ = (
        "_acceptor",
        "_acceptors",
        "_done",
        "_events",
        "_has_changed_user",
        "_is_looked_up",
        "_netns",
        "_outbox",
        "_phase",
        "_poller",
        "_received_bytes",
        "_sock",
        "_tunnel",
        "_user",
        "address",
        "exchange",
        "family",
        "hop",
        "verdict",
    )

    def __init__(
        self,
        exchange: Exchange,
        *,
        netns: Netns,
        family: int,
        address: str,
        poller: LoopPoller,
        acceptors: Acceptors,
        done: "Callable[[DialAttempt], None]",
    ) -> None:
        self.exchange = exchange
        self.family = family
        self.address = address
        self.verdict: ExchangeResult | None = None
        self.hop: DialHop = exchange.hop
        self._netns = netns
        self._poller = poller
        self._acceptors = acceptors
        self._acceptor: Acceptor | None = None
        self._user = 0
        self._has_changed_user = self._is_looked_up = False
        self._done = done
        self._sock: BareSocket | None = None
        self._tunnel: tls.TlsTunnel | None = None
        self._phase = Phase.DIAL
        self._events = 0
        self._outbox = b""
        self._received_bytes = 0

    def start(self) -> None:
        """Start; `done` is called once, maybe before this returns."""
        self._guarded(self._dial)

    def expire(self) -> None:
        """End with the exchange's verdict on a timeout."""
        if self.verdict is None:
            self._guarded(lambda: self._break("", timeout=True))

    def cancel(self) -> None:
        """Stop without a verdict and without calling `done`."""
        self._close()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step; an error in our code ends this attempt, and no other."""
        try:
            step()
        except Exception as error:
            self._end(
                ExchangeResult(ProbeResult.UNKNOWN, f"the prober failed: {error!r}", error=True)
            )
        else:
            if self.verdict is None and self.exchange.verdict is not None:
                self._end(self.exchange.verdict)

    def _end(self, verdict: ExchangeResult) -> None:
        if self.verdict is None:
            if not verdict.result.passed and not verdict.error:
                verdict = self._doubted(verdict)
            self.verdict = verdict
            self._close()
            self._done(self)

    def _doubted(self, failure: ExchangeResult) -> ExchangeResult:
        """A failure of the pod; or none, if another process accepted the connection."""
        if self._acceptor is not None:
            self._acceptor.doubt()
        if self._sock is None or self._phase is Phase.DIAL or self._is_looked_up:
            return failure
        redirection = self._look_up(self._sock)
        return _redirected(redirection) if redirection else failure

    def _look_up(self, sock: BareSocket) -> Redirection | None:
        assert self._acceptor is not None
        self._is_looked_up = True
        return self._acceptor.look_up(self._user, sock)

    def _dial(self) -> None:
        if self.exchange.verdict is not None:
            return
        self.hop = self.exchange.hop
        self._phase = Phase.DIAL
        try:
            self._acceptor = self._acceptors.of(self._netns, self.address, self.hop.port)
            self._user = self._acceptor.user
            sock = self._netns.bare_socket(self.family, socket.SOCK_STREAM, self._user)
        except NetnsGoneError as error:
            self._end(ExchangeResult(ProbeResult.FAILURE, str(error)))
            return
        except OSError as error:
            # Out of descriptors or memory: an error of the host, and the pod's state is unknown.
            self._end(_unknown(error.errno))
            return
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, _QUICKACK_OFF)
        self._connect()

    def _connect(self) -> None:
        """Start to connect, or check whether it has succeeded: connect() does both."""
        assert self._sock is not None
        code = connect_inside(self._sock, (self.address, self.hop.port))
        if code == 0:
            if self._is_redirected(self._sock):
                return
            self._connected()
        elif code in (errno.EALREADY, errno.EINPROGRESS):
            self._watch(select.EPOLLOUT)
        else:
            if code == errno.ECONNREFUSED and self._acceptor is not None:
                self._acceptor.note_rejection(self._user)
            self._fail(code, ": connect")

    def _is_redirected(self, sock: BareSocket) -> bool:
        """Whether another process accepted. Then the same is dialled as another user, or it ends.

        At this point the other end exists, which it may not after the exchange.
        """
        assert self._acceptor is not None
        self._is_looked_up = False
        if not self._acceptor.is_due(self._user):
            return False
        redirection = self._look_up(sock)
        if redirection is None:
            return False
        self._phase = Phase.EXCHANGE
        if self._acceptor.user != self._user and not self._has_changed_user:
            self._has_changed_user = True
            self._close()
            self._dial()
        else:
            self._end(_redirected(redirection))
        return True

    def _connected(self) -> None:
        if self.hop.tls:
            self._phase = Phase.TLS
            self._tunnel = tls.TlsTunnel(self.hop.alpn, self.hop.policy)
            self._outbox = self._tunnel.start()
        else:
            self._phase = Phase.EXCHANGE
            self._outbox = self.exchange.start()
            if self.exchange.verdict is not None:
                return
        self._flush()

    def _on_event(self) -> None:
        self._guarded(self._step)

    def _step(self) -> None:
        assert self._sock is not None
        if self._events & select.EPOLLOUT:
            if self._phase is Phase.DIAL:
                self._connect()
            else:
                self._flush()
            return
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.errno, "read")
            return
        self._received_bytes += len(data)
        if self._received_bytes > RECEIVED_MAX_BYTES:
            self._break(f"the answer is longer than {RECEIVED_MAX_BYTES} bytes")
            return
        sock = self._sock
        if self._tunnel is None:
            self._outbox += self.exchange.receive(data)
        else:
            self._receive_tls(self._tunnel, data)
        if self.exchange.verdict is not None or self._sock is not sock:
            return
        if self.exchange.hop is not self.hop:
            self._close()
            self._dial()
        elif data:
            self._flush()
        else:
            # An exchange decides at the end of the stream; none may wait for more.
            self._break("EOF")

    def _receive_tls(self, tunnel: tls.TlsTunnel, data: bytes) -> None:
        try:
            pieces = tunnel.receive(data)
        except tls.TlsError as error:
            self._outbox = b""
            policy = self.hop.policy
            if error.rejects_client and policy is not None and policy.identity is not None:
                self._end(client_certificates.rejected(str(error)))
            else:
                self._break(str(error))
            return
        if self._phase is Phase.TLS and tunnel.ready:
            self._phase = Phase.EXCHANGE
            tunnel.encrypt(self.exchange.start())
        if tunnel.is_closed:
            pieces.append(b"")
        for piece in pieces:
            reply = self.exchange.receive(piece)
            if self.exchange.verdict is not None or self.exchange.hop is not self.hop:
                return
            tunnel.encrypt(reply)
        self._outbox += tunnel.outgoing()

    def _flush(self) -> None:
        """Send the outbox, then wait for the pod."""
        assert self._sock is not None
        if self._outbox:
            try:
                sent = self._sock.send(self._outbox)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._fail(error.errno, "write")
                return
            self._outbox = self._outbox[sent:]
        self._watch(select.EPOLLOUT if self._outbox else select.EPOLLIN)

    def _watch(self, events: int) -> None:
        assert self._sock is not None
        if not self._events:
            self._poller.watch(self._sock.fileno(), events, self._on_event)
        elif self._events != events:
            self._poller.change(self._sock.fileno(), events)
        self._events = events

    def _fail(self, number: int | None, operation: str) -> None:
        """A system call failed: by an error of the machine, or by the pod's doing."""
        if number in _OWN_ERRORS:
            self._end(_unknown(number))
        else:
            self._break(f"{operation}: {_strerror(number)}")

    def _break(self, text: str, *, timeout: bool = False) -> None:
        """Pass the connection's failure to the exchange, in Go's words.

        Without a verdict the exchange needs another connection: for a hook that falls back to http,
        or a redirect whose body broke off.
        """
        if self._phase is Phase.DIAL:
            text = f"dial tcp {join_host_port(self.address, self.hop.port)}{text}"
        elif text.startswith(("read: ", "write: ")):
            text = f"{text.partition(':')[0]} tcp {self._ends()}: {text}"
        self.exchange.fail(ConnectionFailure(self._phase, text, timeout))
        if self.exchange.verdict is None:
            self._close()
            self._dial()

    def _ends(self) -> str:
        assert self._sock is not None
        try:
            local = self._sock.getsockname()
        except OSError:
            return join_host_port(self.address, self.hop.port)
        return "->".join(
            (join_host_port(local[0], local[1]), join_host_port(self.address, self.hop.port))
        )

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._events:
            self._poller.forget(sock.fileno())
            self._events = 0
        final_bytes = self._tunnel.close() if self._tunnel is not None else b""
        self._outbox = b""
        self._tunnel = None
        if self._phase is not Phase.DIAL:
            _finish(sock, self.family, final_bytes)
        else:
            sock.close()


def _unknown(number: int | None) -> ExchangeResult:
    text = f"no connection can be made in the pod's network namespace: {_strerror(number)}"
    return ExchangeResult(ProbeResult.UNKNOWN, text, error=True)


def _redirected(redirection: Redirection) -> ExchangeResult:
    """No verdict about the pod."""
    return ExchangeResult(ProbeResult.UNKNOWN, redirection.sentence, error=True, is_redirected=True)


def _finish(sock: BareSocket, family: int, final_bytes: bytes) -> None:
    """Close the connection so that close() neither waits nor leaves a TIME-WAIT.

    The side that closes first keeps the port for a minute: 470 probes a second would use up all
    ports of a pod, and long before that each connect() searches thousands. So the pod gets a FIN,
    which a server expects, and then the socket is dropped without another packet (TCP_REPAIR).
    TIME-WAIT protects against late packets; a pod's loopback has none.

    A server that is woken by the FIN may send its own before close(), which would create a
    TIME-WAIT after all. So the socket first stops receiving: it requires more hops left than
    packets have (RFC 5082). Its peer retransmits its FIN a moment later, and gets a RST.
    """
    try:
        if final_bytes:
            sock.send(final_bytes)
        # In repair mode the FIN still goes out, since no queue is chosen for repair.
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        sock.setsockopt(*_HOPS_LEFT_MIN[family], _HOPS_MAX)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        # The pod was first, or there is no CAP_NET_ADMIN in its netns: an ordinary end.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
    sock.close()


def _strerror(number: int | None) -> str:
    """The system's error text in Go's spelling."""
    return os.strerror(number or 0).lower()

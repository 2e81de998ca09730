"""A proxied connection: two sockets, and the data on its way between them."""

import socket
from collections.abc import Callable

from agent.relay.epoll import FAILED, HUNG_UP, READABLE, WRITABLE, EpollPoller
from agent.relay.segments import RESET_ON_CLOSE
from agent.relay.targets import RelayTarget
from probes.netns import BareSocket

# Shared by all connections: it is empty between two events.
_BUFFER = memoryview(bytearray(256 * 1024))


class Connection:
    """A connection of the kubelet, open at both ends. `on_closed` is called once."""

    __slots__ = (
        "_is_closed",
        "_on_closed",
        "is_active",
        "kubelet",
        "open_seconds",
        "pod",
        "port",
        "target",
    )

    def __init__(
        self,
        poller: EpollPoller,
        kubelet: BareSocket,
        pod: BareSocket,
        *,
        target: RelayTarget,
        port: int,
        open_seconds: float,
        on_closed: Callable[["Connection", bool], None],
    ) -> None:
        """on_closed: gets the connection, and whether the pod reset it."""
        self.target = target
        self.port = port
        self.open_seconds = open_seconds
        self.is_active = True
        """Whether there was an event since a caller set it to False."""
        self._on_closed = on_closed
        self._is_closed = False
        self.kubelet = ConnectionSide(poller, kubelet, self)
        self.pod = ConnectionSide(poller, pod, self)
        self.kubelet.peer, self.pod.peer = self.pod, self.kubelet
        for side in (self.kubelet, self.pod):
            side.start()

    def pass_on(self, data: bytes) -> None:
        """Send to the pod what the kubelet sent before this connection was created."""
        self.pod.write(memoryview(data))

    @property
    def is_half_closed(self) -> bool:
        return self.kubelet.is_closed or self.pod.is_closed

    def finish(self) -> None:
        """Close both sides. Data that was sent still arrives."""
        self._close(was_reset_by_pod=False)

    def reset(self, by: "ConnectionSide | None" = None) -> None:
        """Reset the side that is not `by`; both, if the relay itself ends the connection."""
        if self._is_closed:
            return
        for side in (self.kubelet, self.pod):
            if side is not by:
                side.reset_on_close()
        self._close(was_reset_by_pod=by is self.pod)

    def _close(self, *, was_reset_by_pod: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.kubelet.close()
        self.pod.close()
        self._on_closed(self, was_reset_by_pod)


class ConnectionSide:
    """One of the two sockets. Data read here is written to the other.

    A side is not read while its peer has unsent data. So a slow reader slows down its sender, and
    the relay stores at most one buffer.
    """

    __slots__ = (
        "_connection",
        "_events",
        "_poller",
        "_socket",
        "_unsent",
        "is_closed",
        "is_spent",
        "peer",
    )

    peer: "ConnectionSide"

    def __init__(self, poller: EpollPoller, sock: BareSocket, connection: Connection) -> None:
        self._poller = poller
        self._socket = sock
        self._connection = connection
        self._unsent = b""
        self._events: int | None = None
        self.is_closed = False
        """Whether the remote end has sent its FIN."""
        self.is_spent = False
        """Whether the remote end must not send more. A second request of the kubelet to a shared
        port may belong to another pod. When its connection is reset, Go's client repeats it on
        another one (net/http, persistConn.shouldRetryRequest)."""

    def start(self) -> None:
        self._update()

    def on_event(self, events: int) -> None:
        self._connection.is_active = True
        if events & FAILED:
            self._connection.reset(by=self)
            return
        if events & WRITABLE:
            self._flush()
        if events & (READABLE | HUNG_UP):
            self._read()

    def reset_on_close(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    def close(self) -> None:
        if self._events is not None:
            self._poller.unregister_closed(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        if self.is_closed or self.peer._unsent:
            # Hung up with unread data that the peer cannot accept yet: epoll would report it again
            # and again.
            if self._events is not None:
                self._poller.unregister(self._socket.fileno())
                self._events = None
            return
        try:
            count = self._socket.recv_into(_BUFFER, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._connection.reset(by=self)
            return
        if count and self.is_spent:
            self._connection.reset()
        elif count:
            self.peer.write(_BUFFER[:count])
        else:
            self.is_closed = True
            self.peer._shutdown_write()

    def write(self, data: memoryview) -> None:
        """Send to the remote end, and store what does not fit. There must be no such data yet."""
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._connection.reset(by=self)
            return
        if sent < len(data):
            self._unsent = bytes(data[sent:])
            self._update()
            self.peer._update()

    def _flush(self) -> None:
        if not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._connection.reset(by=self)
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._update()
            self.peer._update()

    def _shutdown_write(self) -> None:
        """Pass on the FIN of the peer's remote end, which is read once all data is sent."""
        if self.is_closed:
            self._connection.finish()
            return
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._connection.reset(by=self)
            return
        self.peer._update()

    def _update(self) -> None:
        """Register for the events that this side can handle now."""
        events = WRITABLE if self._unsent else 0
        if not self.is_closed and not self.peer._unsent:
            events |= READABLE
        if events == self._events:
            return
        fd = self._socket.fileno()
        if self._events is None:
            self._poller.register(fd, events, self)
        else:
            self._poller.change(fd, events)
        self._events = events

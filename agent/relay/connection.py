"""One carried connection: two sockets, and what is on its way between them."""

import socket
from collections.abc import Callable

from agent.relay.epoll import FAILED, HUNG_UP, READABLE, WRITABLE, Poller
from agent.relay.segments import RESET_ON_CLOSE
from agent.relay.targets import Target

# One for all connections: nothing stays in it between two events.
_BUFFER = memoryview(bytearray(256 * 1024))


class Carried:
    """A connection of the kubelet's, opened at both ends. `on_end` is called once."""

    __slots__ = (
        "_is_over",
        "_on_end",
        "active",
        "kubelet",
        "open_seconds",
        "pod",
        "port",
        "target",
    )

    def __init__(
        self,
        poller: Poller,
        kubelet: socket.socket,
        pod: socket.socket,
        *,
        target: Target,
        port: int,
        open_seconds: float,
        on_end: Callable[["Carried", bool], None],
    ) -> None:
        """on_end: with whether the pod reset it."""
        self.target = target
        self.port = port
        self.open_seconds = open_seconds
        self.active = True
        """Whether anything happened since somebody set it False."""
        self._on_end = on_end
        self._is_over = False
        self.kubelet = Side(poller, kubelet, self)
        self.pod = Side(poller, pod, self)
        self.kubelet.other, self.pod.other = self.pod, self.kubelet
        for side in (self.kubelet, self.pod):
            side.start()

    @property
    def is_half_closed(self) -> bool:
        return self.kubelet.has_ended or self.pod.has_ended

    def finish(self) -> None:
        """Close both: what was sent arrives."""
        self._end(was_reset_by_pod=False)

    def reset(self, by: "Side | None" = None) -> None:
        """One side was reset, so the other is; or both, if it is nobody's doing but ours."""
        if self._is_over:
            return
        for side in (self.kubelet, self.pod):
            if side is not by:
                side.make_reset()
        self._end(was_reset_by_pod=by is self.pod)

    def _end(self, *, was_reset_by_pod: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        self.kubelet.close()
        self.pod.close()
        self._on_end(self, was_reset_by_pod)


class Side:
    """One of the two sockets. What comes in here goes out at the other.

    Reading stops while the other has not taken what was read before, so a slow reader slows its
    sender and nothing piles up here but one buffer.
    """

    __slots__ = ("_carried", "_events", "_poller", "_socket", "_unsent", "has_ended", "other")

    other: "Side"

    def __init__(self, poller: Poller, sock: socket.socket, carried: Carried) -> None:
        self._poller = poller
        self._socket = sock
        self._carried = carried
        self._unsent = b""
        self._events: int | None = None
        self.has_ended = False
        """Whether its peer has sent all that it will send."""

    def start(self) -> None:
        self._update()

    def on_event(self, events: int) -> None:
        self._carried.active = True
        if events & FAILED:
            self._carried.reset(by=self)
            return
        if events & WRITABLE:
            self._flush()
        if events & (READABLE | HUNG_UP):
            self._read()

    def make_reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    def close(self) -> None:
        if self._events is not None:
            self._poller.forget_closed(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        if self.has_ended or self.other._unsent:
            # Hung up with something left to read, which nobody takes yet: told again for ever.
            if self._events is not None:
                self._poller.forget(self._socket.fileno())
                self._events = None
            return
        try:
            count = self._socket.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            self._carried.reset(by=self)
            return
        if count:
            self.other._write(_BUFFER[:count])
        else:
            self.has_ended = True
            self.other._end_writing()

    def _write(self, data: memoryview) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._carried.reset(by=self)
            return
        if sent < len(data):
            self._unsent = bytes(data[sent:])
            self._update()
            self.other._update()

    def _flush(self) -> None:
        if not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._carried.reset(by=self)
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._update()
            if self.other.has_ended:
                self._end_writing()
            else:
                self.other._update()

    def _end_writing(self) -> None:
        """The other side's peer has sent all: so says this side to its own, when all is out."""
        if self._unsent:
            self.other._update()
            return
        if self.has_ended:
            self._carried.finish()
            return
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._carried.reset(by=self)
            return
        self.other._update()

    def _update(self) -> None:
        wanted = WRITABLE if self._unsent else 0
        if not self.has_ended and not self.other._unsent:
            wanted |= READABLE
        if wanted == self._events:
            return
        fd = self._socket.fileno()
        if self._events is None:
            self._poller.watch(fd, wanted, self)
        else:
            self._poller.change(fd, wanted)
        self._events = wanted

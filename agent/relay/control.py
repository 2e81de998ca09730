"""The relay's end of the socket pair with its agent."""

import socket
from collections.abc import Callable

from agent.relay import messages
from agent.relay.epoll import HUNG_UP, READABLE, WRITABLE, Poller

_READ_BYTES = 1 << 16


class Control:
    """Reads what the agent says and tells it things, without ever waiting for it."""

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        *,
        on_message: Callable[[messages.ToRelay], None],
        on_end: Callable[[], None],
    ) -> None:
        """on_end: the agent has closed its end, has died, or says what nobody understands."""
        sock.setblocking(False)
        self._poller = poller
        self._socket = sock
        self._on_message = on_message
        self._on_end = on_end
        self._frames = messages.Frames()
        self._unsent = b""
        self._is_open = True
        poller.watch(sock.fileno(), READABLE, self)

    @property
    def is_idle(self) -> bool:
        """Whether the agent has taken all that it was told; it never does when it is gone."""
        return self._is_open and not self._unsent

    def tell(self, message: messages.FromRelay) -> None:
        if not self._is_open:
            return
        self._unsent += messages.pack(message)
        self._flush()

    def on_event(self, events: int) -> None:
        if events & WRITABLE:
            self._flush()
        if events & (READABLE | HUNG_UP) and self._is_open:
            self._read()

    def _read(self) -> None:
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        try:
            told = [messages.read_for_relay(body) for body in self._frames.feed(received)]
        except messages.FrameError:
            received, told = b"", []
        for message in told:
            self._on_message(message)
        if not received:
            self._end()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end()
            return
        self._unsent = self._unsent[sent:]
        self._poller.change(self._socket.fileno(), READABLE | (WRITABLE if self._unsent else 0))

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._unsent = b""
        self._poller.forget(self._socket.fileno())
        self._socket.close()
        self._on_end()

"""The socket pair of a relay and its agent, and the relay's end of it."""

import socket
from collections.abc import Callable
from typing import Any

from agent.relay import messages
from agent.relay.epoll import HUNG_UP, READABLE, WRITABLE, EpollPoller
from probes.netns import SHORTAGES

_READ_BYTES = 1 << 16


class ControlSocket(socket.socket):
    """One end, for which a shortage of the machine is not the end of the channel.

    Its calls raise `BlockingIOError` then, as for a full socket, so event loops try again. They do
    at once, but the kernel waits for memory before it reports that it has none.
    """

    def recv(self, *arguments: Any) -> bytes:
        try:
            return super().recv(*arguments)
        except OSError as error:
            _raise_temporary(error)
            raise

    def send(self, *arguments: Any) -> int:
        try:
            return super().send(*arguments)
        except OSError as error:
            _raise_temporary(error)
            raise

    def sendmsg(self, *arguments: Any) -> int:
        """As asyncio sends since Python 3.12."""
        try:
            return super().sendmsg(*arguments)
        except OSError as error:
            _raise_temporary(error)
            raise


def _raise_temporary(error: OSError) -> None:
    if error.errno in SHORTAGES:
        raise BlockingIOError(error.errno, error.strerror) from error


class ControlChannel:
    """Receives the agent's messages and sends the relay's, without ever blocking."""

    def __init__(
        self,
        poller: EpollPoller,
        sock: socket.socket,
        *,
        on_message: Callable[[messages.ToRelay], None],
        on_closed: Callable[[], None],
    ) -> None:
        """on_closed: the agent closed its end, died, or sent an invalid message."""
        sock.setblocking(False)
        self._poller = poller
        self._socket = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = messages.Frames()
        self._unsent = b""
        self._is_open = True
        poller.register(sock.fileno(), READABLE, self)

    @property
    def is_idle(self) -> bool:
        """Whether the channel is open and all messages are sent."""
        return self._is_open and not self._unsent

    def send(self, message: messages.FromRelay) -> None:
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
            decoded = [messages.decode_for_relay(body) for body in self._frames.feed(received)]
        except messages.FrameError:
            received, decoded = b"", []
        for message in decoded:
            self._on_message(message)
        if not received:
            self._close()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        self._unsent = self._unsent[sent:]
        self._poller.change(self._socket.fileno(), READABLE | (WRITABLE if self._unsent else 0))

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._unsent = b""
        self._poller.unregister(self._socket.fileno())
        self._socket.close()
        self._on_closed()

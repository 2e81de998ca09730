"""Accepted connections to shared ports: each waits for the request that shows its pod."""

import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from agent.relay.epoll import READABLE, EpollPoller
from agent.relay.segments import RESET_ON_CLOSE
from agent.relay.shared_requests import is_complete
from agent.relay.targets import RelayTarget
from probes.netns import BareSocket

# The kubelet sends its request at once.
_REQUEST_SECONDS = 5.0
_READ_BYTES = 16384


class Choice(NamedTuple):
    """A connection that was accepted for a target, and what is known of it so far."""

    kubelet: BareSocket
    claimant: RelayTarget
    port: int
    open_seconds: float
    received: bytes = b""


class _Undecided:
    """Handles the kubelet's socket."""

    __slots__ = ("_owner", "choice", "deadline")

    def __init__(self, owner: "Choosing", choice: Choice, deadline: float) -> None:
        self._owner = owner
        self.choice = choice
        self.deadline = deadline

    def on_event(self, events: int) -> None:
        self._owner.on_readable(self)


class Choosing:
    """All connections whose pod is not found yet."""

    def __init__(
        self,
        poller: EpollPoller,
        *,
        on_request: Callable[[Choice], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_request: owns the socket; `received` is all that the kubelet has sent."""
        self._poller = poller
        self._on_request = on_request
        self._now = now
        self._undecided: set[_Undecided] = set()

    def __len__(self) -> int:
        return len(self._undecided)

    def add(self, choice: Choice) -> None:
        """Own the socket."""
        undecided = _Undecided(self, choice, self._now() + _REQUEST_SECONDS)
        self._undecided.add(undecided)
        self._poller.register(choice.kubelet.fileno(), READABLE, undecided)

    def on_readable(self, undecided: _Undecided) -> None:
        choice = undecided.choice
        try:
            data = choice.kubelet.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(undecided)
            choice.kubelet.close()
            return
        undecided.choice = choice._replace(received=choice.received + data)
        if is_complete(undecided.choice.received):
            self._decide(undecided)

    def expire(self) -> None:
        """Decide by what was received where the rest takes too long."""
        now = self._now()
        for undecided in [each for each in self._undecided if now > each.deadline]:
            self._decide(undecided)

    def abandon(self, claimant: RelayTarget) -> None:
        """Reset the connections that were accepted for this target."""
        for undecided in [each for each in self._undecided if each.choice.claimant is claimant]:
            self._forget(undecided)
            reset(undecided.choice.kubelet)

    def _decide(self, undecided: _Undecided) -> None:
        self._poller.unregister(undecided.choice.kubelet.fileno())
        self._undecided.discard(undecided)
        self._on_request(undecided.choice)

    def _forget(self, undecided: _Undecided) -> None:
        self._poller.unregister_closed(undecided.choice.kubelet.fileno())
        self._undecided.discard(undecided)


def reset(sock: BareSocket) -> None:
    """Close a socket with a RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    sock.close()

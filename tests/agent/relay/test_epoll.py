"""Each event reaches the handler of its descriptor, and no other."""

import contextlib
import os
import socket

from agent.relay.epoll import READABLE, EpollPoller


class Recorder:
    def __init__(self) -> None:
        self.events: list[int] = []

    def on_event(self, events: int) -> None:
        self.events.append(events)


class Replacer:
    """At its first event replaces both descriptors by duplicates of a socket without events."""

    def __init__(
        self, poller: EpollPoller, pair: list[socket.socket], quiet: socket.socket
    ) -> None:
        self._poller = poller
        self._pair = pair
        self._quiet = quiet
        self.successor = Recorder()
        self.rounds = 0

    def on_event(self, events: int) -> None:
        self.rounds += 1
        for sock in self._pair:
            self._poller.unregister_closed(sock.fileno())
        number = self._pair[-1].fileno()
        first = self._pair[0].fileno()
        for fd in (first, number):
            os.dup2(self._quiet.fileno(), fd)
            self._poller.register(fd, READABLE, self.successor)


def test_descriptor_reused_within_a_round_gets_no_event_of_its_predecessor() -> None:
    with contextlib.ExitStack() as stack:
        poller = EpollPoller()
        stack.callback(poller.close)
        pairs = [socket.socketpair() for _ in range(2)]
        quiet, other = socket.socketpair()
        for sock in (quiet, other, *(end for pair in pairs for end in pair)):
            stack.enter_context(sock)
        replacer = Replacer(poller, [near for near, _ in pairs], quiet)
        for near, far in pairs:
            poller.register(near.fileno(), READABLE, replacer)
            far.send(b"x")
        poller.poll(1)
        assert replacer.rounds == 1
        assert replacer.successor.events == []
        # It does get its own events.
        other.send(b"y")
        poller.poll(1)
        assert replacer.successor.events == [READABLE, READABLE]

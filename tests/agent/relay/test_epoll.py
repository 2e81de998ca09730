"""Events go to whom they are of."""

import contextlib
import os
import socket

from agent.relay.epoll import READABLE, Poller


class Recorder:
    def __init__(self) -> None:
        self.events: list[int] = []

    def on_event(self, events: int) -> None:
        self.events.append(events)


class Replacer:
    """Closes whichever of two descriptors is told of first, and gives the other's number to a
    socket on which nothing happens."""

    def __init__(self, poller: Poller, pair: list[socket.socket], quiet: socket.socket) -> None:
        self._poller = poller
        self._pair = pair
        self._quiet = quiet
        self.successor = Recorder()
        self.rounds = 0

    def on_event(self, events: int) -> None:
        self.rounds += 1
        for sock in self._pair:
            self._poller.forget_closed(sock.fileno())
        number = self._pair[-1].fileno()
        first = self._pair[0].fileno()
        for fd in (first, number):
            os.dup2(self._quiet.fileno(), fd)
            self._poller.watch(fd, READABLE, self.successor)


def test_a_number_that_is_given_out_again_within_a_round_hears_nothing_of_its_predecessor() -> None:
    with contextlib.ExitStack() as stack:
        poller = Poller()
        stack.callback(poller.close)
        pairs = [socket.socketpair() for _ in range(2)]
        quiet, other = socket.socketpair()
        for sock in (quiet, other, *(end for pair in pairs for end in pair)):
            stack.enter_context(sock)
        watcher = Replacer(poller, [near for near, _ in pairs], quiet)
        for near, far in pairs:
            poller.watch(near.fileno(), READABLE, watcher)
            far.send(b"x")
        poller.poll(1)
        assert watcher.rounds == 1
        assert watcher.successor.events == []
        # It is told of what is its own.
        other.send(b"y")
        poller.poll(1)
        assert watcher.successor.events == [READABLE, READABLE]

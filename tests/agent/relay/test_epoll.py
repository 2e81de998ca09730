"""The relay's event loop: which handlers are called, and for which file."""

import os
from collections.abc import Callable, Iterator

import pytest

from agent.relay.epoll import READABLE, WRITABLE, EpollPoller


class Handler:
    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.events: list[int] = []
        self._then = then

    def on_event(self, events: int) -> None:
        self.events.append(events)
        self._then()


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """Two pipes with something to read."""
    made = [os.pipe(), os.pipe()]
    for _, writer in made:
        os.write(writer, b"x")
    yield made
    for fd in (fd for pair in made for fd in pair):
        try:
            os.close(fd)
        except OSError:
            continue


def test_descriptor_that_is_unregistered_has_no_events_and_can_be_registered_again(
    poller: EpollPoller, pipes: list[tuple[int, int]]
) -> None:
    (reader, _), _ = pipes
    first, second = Handler(), Handler()
    poller.register(reader, READABLE, first)
    assert poller.is_registered(reader)
    poller.poll(0)
    assert first.events == [READABLE]
    poller.unregister(reader)
    assert not poller.is_registered(reader)
    poller.poll(0)
    poller.register(reader, READABLE, second)
    poller.poll(0)
    assert (first.events, second.events) == ([READABLE], [READABLE])


def test_events_can_be_changed(poller: EpollPoller, pipes: list[tuple[int, int]]) -> None:
    (_, writer), _ = pipes
    handler = Handler()
    poller.register(writer, 0, handler)
    poller.poll(0)
    assert handler.events == []
    poller.change(writer, WRITABLE)
    poller.poll(0)
    assert handler.events == [WRITABLE]


def test_event_of_a_file_that_was_closed_in_this_round_is_not_the_next_files(
    poller: EpollPoller, pipes: list[tuple[int, int]]
) -> None:
    """Both are ready: whichever is first closes the other, whose number is reused."""
    readers = [reader for reader, _ in pipes]
    reused = Handler()
    spare, other_end = os.pipe()
    pipes.append((spare, other_end))

    def replace(other: int) -> Callable[[], None]:
        def close_and_reuse() -> None:
            if not reused.events and len(handlers[0].events + handlers[1].events) == 1:
                poller.unregister_closed(other)
                os.dup2(spare, other)
                poller.register(other, READABLE, reused)

        return close_and_reuse

    handlers = [Handler(replace(readers[1])), Handler(replace(readers[0]))]
    for reader, handler in zip(readers, handlers, strict=True):
        poller.register(reader, READABLE, handler)
    poller.poll(0)
    assert len(handlers[0].events + handlers[1].events) == 1
    assert reused.events == []

"""The relay's end of the socket pair with its agent."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from agent.relay import messages
from agent.relay.control import Control
from agent.relay.epoll import Poller


class Relay:
    """What the control tells of, and the agent's end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.poller = stack.enter_context(contextlib.closing(Poller()))
        self.agent, ours = socket.socketpair()
        stack.callback(self.agent.close)
        self.agent.settimeout(5)
        self.told: list[messages.ToRelay] = []
        self.ends = 0
        self.control = Control(
            self.poller, ours, on_message=self.told.append, on_end=self._count_end
        )
        stack.callback(ours.close)

    def _count_end(self) -> None:
        self.ends += 1


@pytest.fixture
def relay() -> Iterator[Relay]:
    with contextlib.ExitStack() as stack:
        yield Relay(stack)


def test_messages_are_told_whole_however_they_are_cut(relay: Relay) -> None:
    sent = messages.pack(messages.Paired(7)) + messages.pack(messages.Engage())
    for byte in sent:
        relay.agent.send(bytes([byte]))
        relay.poller.poll(5)
    assert relay.told == [messages.Paired(7), messages.Engage()]


def test_what_was_said_before_the_agent_closed_is_told_before_the_end(relay: Relay) -> None:
    relay.agent.send(messages.pack(messages.Engage()))
    relay.agent.close()
    relay.poller.poll(5)
    assert relay.told == [messages.Engage()]
    relay.poller.poll(5)
    assert relay.ends == 1


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b"\0\0\0\x01x"])
def test_what_nobody_understands_ends_the_conversation(relay: Relay, junk: bytes) -> None:
    relay.agent.send(junk)
    relay.poller.poll(5)
    assert relay.ends == 1
    assert relay.told == []


def test_an_error_of_the_relays_own_is_no_end_of_the_conversation(relay: Relay) -> None:
    def fail(message: messages.ToRelay) -> None:
        raise OSError("no namespace can be made")

    relay.control._on_message = fail
    relay.agent.send(messages.pack(messages.Engage()))
    with pytest.raises(OSError, match="no namespace"):
        relay.poller.poll(5)
    relay.control.tell(messages.Failed("no namespace can be made"))
    frames = messages.Frames()
    (body,) = frames.feed(relay.agent.recv(1 << 16))
    assert messages.read_for_agent(body) == messages.Failed("no namespace can be made")
    assert relay.ends == 0


def test_an_agent_that_does_not_read_is_not_waited_for(relay: Relay) -> None:
    report = messages.Report(0, 0, False, ())
    count = 0
    while relay.control.is_idle:
        relay.control.tell(report)
        count += 1
    frames = messages.Frames()
    got = 0
    while got < count:
        got += len(list(frames.feed(relay.agent.recv(1 << 20))))
        relay.poller.poll(0)
    assert relay.control.is_idle

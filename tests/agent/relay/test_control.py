"""The relay's end of the socket pair with its agent."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from agent.relay import messages
from agent.relay.control import ControlChannel, ControlSocket
from agent.relay.epoll import EpollPoller
from tests.agent.relay import shortages


class Relay:
    """A control channel that records messages, and the agent's end of it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.poller = stack.enter_context(contextlib.closing(EpollPoller()))
        self.agent, theirs = socket.socketpair()
        stack.callback(self.agent.close)
        ours = ControlSocket(fileno=theirs.detach())
        self.agent.settimeout(5)
        self.received: list[messages.ToRelay] = []
        self.closed_count = 0
        self.control = ControlChannel(
            self.poller, ours, on_message=self.received.append, on_closed=self._count_closed
        )
        stack.callback(ours.close)
        self.descriptor = ours.fileno()

    def _count_closed(self) -> None:
        self.closed_count += 1


@pytest.fixture
def relay() -> Iterator[Relay]:
    with contextlib.ExitStack() as stack:
        yield Relay(stack)


def test_split_messages_are_reassembled(relay: Relay) -> None:
    sent = messages.pack(messages.PairReady(7)) + messages.pack(messages.Engage())
    for byte in sent:
        relay.agent.send(bytes([byte]))
        relay.poller.poll(5)
    assert relay.received == [messages.PairReady(7), messages.Engage()]


def test_messages_sent_before_the_agent_closed_are_received_first(relay: Relay) -> None:
    relay.agent.send(messages.pack(messages.Engage()))
    relay.agent.close()
    relay.poller.poll(5)
    assert relay.received == [messages.Engage()]
    relay.poller.poll(5)
    assert relay.closed_count == 1
    assert not relay.control.is_idle
    relay.control.send(messages.Engaged())
    relay.poller.poll(0)
    assert relay.closed_count == 1


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b"\0\0\0\x01x"])
def test_invalid_message_closes_the_channel(relay: Relay, junk: bytes) -> None:
    relay.agent.send(junk)
    relay.poller.poll(5)
    assert relay.closed_count == 1
    assert relay.received == []
    assert relay.agent.recv(1) == b""
    assert not relay.poller.is_registered(relay.descriptor)


def test_agent_that_dies_while_messages_wait_closes_the_channel_once(relay: Relay) -> None:
    while relay.control.is_idle:
        relay.control.send(messages.RelayReport(0, 0, False, ()))
    relay.agent.close()
    relay.poller.poll(5)
    relay.control.send(messages.Engaged())
    relay.poller.poll(0)
    assert relay.closed_count == 1
    assert not relay.control.is_idle


def test_agent_that_dies_without_reading_closes_the_channel(relay: Relay) -> None:
    relay.control.send(messages.Engaged())
    relay.agent.close()
    relay.poller.poll(5)
    assert relay.closed_count == 1


def test_message_to_an_agent_that_is_gone_closes_the_channel(relay: Relay) -> None:
    relay.agent.close()
    relay.control.send(messages.Engaged())
    assert relay.closed_count == 1
    assert not relay.control.is_idle


def test_error_of_the_relay_itself_keeps_the_channel_open(relay: Relay) -> None:
    def fail(message: messages.ToRelay) -> None:
        raise OSError("cannot create a network namespace")

    relay.control._on_message = fail
    relay.agent.send(messages.pack(messages.Engage()))
    with pytest.raises(OSError, match="cannot create"):
        relay.poller.poll(5)
    relay.control.send(messages.RelayFailed("cannot create a network namespace"))
    frames = messages.Frames()
    (body,) = frames.feed(relay.agent.recv(1 << 16))
    assert messages.decode_for_agent(body) == messages.RelayFailed(
        "cannot create a network namespace"
    )
    assert relay.closed_count == 0


def test_agent_that_does_not_read_never_blocks_the_relay(relay: Relay) -> None:
    report = messages.RelayReport(0, 0, False, ())
    count = 0
    while relay.control.is_idle:
        relay.control.send(report)
        count += 1
    frames = messages.Frames()
    got = 0
    while got < count:
        got += len(list(frames.feed(relay.agent.recv(1 << 20))))
        relay.poller.poll(0)
    assert relay.control.is_idle


def test_shortage_of_memory_keeps_the_channel_open(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shortages.of_calls(monkeypatch, times=3):
        relay.agent.sendall(messages.pack(messages.Engage()))
        relay.control.send(messages.Engaged())
        for _ in range(6):  # three of both, and the messages
            relay.poller.poll(0.1)
    assert relay.received == [messages.Engage()]
    (body,) = messages.Frames().feed(relay.agent.recv(1 << 16))
    assert messages.decode_for_agent(body) == messages.Engaged()
    assert relay.closed_count == 0

"""The agent's end of the channel to a relay."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from agent.relay import messages
from agent.strict.process import RelayChannel, RelayError
from agent.strict.stats import ConnectionStats
from tests import polling
from tests.agent.relay import shortages
from tests.agent.strict.strict_pods import strict_pod

_REPORT = messages.RelayReport(0, 0, False, ())
_WEB = strict_pod("web", "198.18.1.1")


class Relay:
    """A channel, and the relay's end of it."""

    channel: RelayChannel
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self) -> None:
        self.store = PodStore(Conditions())
        self.store.pods[_WEB.pod.uid] = _WEB
        self.stats = ConnectionStats(self.store)
        self.wake = asyncio.Event()

    def send(self, *sent: messages.FromRelay) -> None:
        self.writer.write(b"".join(map(messages.pack, sent)))

    async def received(self) -> list[messages.ToRelay]:
        """Until the agent's end is closed."""
        return [*map(messages.decode_for_relay, messages.Frames().feed(await self.reader.read()))]

    def request(self) -> "asyncio.Task[messages.Engaged]":
        return asyncio.create_task(self.channel.request(messages.Engage(), messages.Engaged))


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Relay]:
    ours, theirs = socket.socketpair()
    relay = Relay()
    relay.channel = await RelayChannel.open(ours, stats=relay.stats, wake=relay.wake)
    relay.reader, relay.writer = await asyncio.open_connection(sock=theirs)
    try:
        yield relay
    finally:
        relay.channel.close()
        relay.writer.close()


async def test_shortage_of_memory_ends_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    with shortages.of_calls(monkeypatch, times=3):
        async with opened() as relay:
            requested = relay.request()
            body = await relay.reader.readexactly(len(messages.pack(messages.Engage())))
            relay.send(_REPORT, messages.Engaged())
            assert await requested == messages.Engaged()
            assert body == messages.pack(messages.Engage())
            assert (relay.channel.problem, relay.channel.reports) == (None, 1)


async def test_reports_come_between_responses_and_are_counted() -> None:
    key = f"{_WEB.pod.uid} 198.18.1.1"
    buckets = (0,) * len(messages.OPEN_BUCKETS)
    sample = messages.OutcomeSample(key, 8080, "proxied", 2, 0.5, buckets)
    answer = messages.AnswerSample(key, 8080, "healthy", 3)
    report = messages.RelayReport(1, 2, False, (sample,), (answer,))
    async with opened() as relay:
        requested = relay.request()
        relay.send(_REPORT, report, messages.RelayWarning("A SYN is lost."), messages.Engaged())
        with structlog.testing.capture_logs() as lines:
            assert await requested == messages.Engaged()
        assert (relay.channel.reports, relay.channel.last_report) == (2, report)
        assert not relay.wake.is_set()
    assert [(line["event"], line["problem"]) for line in lines] == [
        (Event.RELAY_WARNING, "A SYN is lost.")
    ]
    assert [one.outcomes for one in relay.stats.status(_WEB.pod.uid)] == [{"proxied": 2}]
    assert [count for *_, count in relay.stats.answers.items()] == [3]


async def test_response_of_another_kind_is_an_error_and_a_late_one_is_ignored() -> None:
    async with opened() as relay:
        requested = relay.request()
        relay.send(messages.NetnsReady(), messages.NetnsReady())
        with pytest.raises(RelayError, match="it sent NetnsReady, not Engaged"):
            await requested
        relay.send(messages.NetnsReady(), _REPORT)
        await polling.until("both are read", lambda: relay.channel.reports == 1)
        requested = relay.request()
        await asyncio.sleep(0)
        relay.send(messages.Engaged())
        assert await requested == messages.Engaged()
        assert relay.channel.problem is None


@pytest.mark.looptime
async def test_relay_that_does_not_respond_is_waited_for_ten_seconds() -> None:
    async with opened() as relay:
        started = asyncio.get_running_loop().time()
        with pytest.raises(RelayError, match="it did not respond within 10 s"):
            await relay.request()
        assert asyncio.get_running_loop().time() - started == pytest.approx(10)
        assert relay.channel.problem is None


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (messages.pack(messages.RelayFailed("no map")), "no map"),
        (b"\xff\xff\xff\xff", "it sent an invalid message: frame of 4294967295 bytes exceeds"),
        (b"", "it exited"),
    ],
    ids=["failed", "invalid", "exited"],
)
async def test_first_problem_of_a_relay_is_the_reason_from_then_on(
    sent: bytes, problem: str
) -> None:
    async with opened() as relay:
        requested = relay.request()
        await asyncio.sleep(0)
        relay.writer.write(sent)
        relay.writer.write_eof()
        with pytest.raises(RelayError, match=problem):
            await requested
        await relay.wake.wait()
        await asyncio.wait([relay.channel._task])
        assert (relay.channel.problem or "").startswith(problem)
        with pytest.raises(RelayError, match=problem):
            await relay.request()
        relay.channel.send(messages.Release(1.0))
        relay.channel.close()
        assert await relay.received() == [messages.Engage()]


async def test_relay_that_ends_without_reading_has_exited() -> None:
    """A reset instead of the end of the stream."""
    ours, theirs = socket.socketpair()
    relay = Relay()
    channel = await RelayChannel.open(ours, stats=relay.stats, wake=relay.wake)
    with contextlib.closing(channel):
        channel.send(messages.Release(1.0))
        theirs.close()
        await relay.wake.wait()
        assert channel.problem == "it exited"


async def test_message_without_a_response_is_sent_and_the_channel_closed_behind_it() -> None:
    async with opened() as relay:
        relay.channel.send(messages.Release(1.0))
        relay.channel.close()
        assert await relay.received() == [messages.Release(1.0)]
        await asyncio.wait([relay.channel._task])
        assert not relay.wake.is_set()

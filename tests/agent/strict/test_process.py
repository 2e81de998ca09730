"""The agent's end of the channel to a relay."""

import asyncio
import socket

import pytest

from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from agent.relay import messages
from agent.strict.process import RelayChannel
from agent.strict.stats import ConnectionStats
from tests.agent.relay import shortages

_REPORT = messages.RelayReport(0, 0, False, ())


async def test_shortage_of_memory_ends_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    stats = ConnectionStats(PodStore(Conditions()))
    with shortages.of_calls(monkeypatch, times=3):
        channel = await RelayChannel.open(ours, stats=stats, wake=asyncio.Event())
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            requested = asyncio.create_task(channel.request(messages.Engage(), messages.Engaged))
            body = await reader.readexactly(len(messages.pack(messages.Engage())))
            writer.write(messages.pack(_REPORT) + messages.pack(messages.Engaged()))
            assert await requested == messages.Engaged()
            assert body == messages.pack(messages.Engage())
            assert (channel.problem, channel.reports) == (None, 1)
        finally:
            channel.close()
            writer.close()

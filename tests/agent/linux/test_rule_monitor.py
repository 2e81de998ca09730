"""Changes of rules are reported by namespace, at a limited rate; lost messages as a change of all.

The socket is a pair of datagram sockets, so that the test sends the messages; time is fake.
"""

import asyncio
import struct

import pytest

from agent.linux.rule_monitor import RuleMonitor
from tests.agent.linux.test_link_monitor import Netlink

pytestmark = pytest.mark.looptime

OWN, SEVEN, EIGHT = b"", struct.pack("=i", 7), struct.pack("=i", 8)


class Monitored:
    """What a monitor called back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.netlink = Netlink()
        monkeypatch.setattr("socket.socket", self.netlink)
        self.calls: list[set[int] | None] = []
        self.monitor = RuleMonitor(
            lambda changed: self.calls.append(None if changed is None else set(changed))
        )

    async def run(self, seconds: float, *messages: bytes | None, every: float = 1.0) -> None:
        """Send the same messages again and again, for some time."""
        task = asyncio.create_task(self.monitor.run())
        await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while loop.time() < ends:
            self.netlink.send(*messages)
            await asyncio.sleep(every)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_may_have_changed_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0)
    assert monitored.calls == [None]


async def test_changes_are_reported_by_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.5, SEVEN, EIGHT, SEVEN, OWN)
    assert monitored.calls == [None, {7, 8}]


async def test_changes_of_the_node_itself_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.5, OWN, OWN)
    assert monitored.calls == [None]


async def test_lost_messages_may_be_those_of_any_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.5, SEVEN, None)
    assert monitored.calls == [None, None]


async def test_a_flood_is_read_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(10, SEVEN, every=0.004)
    assert len(monitored.calls) <= 1 + 10 + 10 * 5 + 1


async def test_no_message_of_another_namespace_is_lost_in_a_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(3, *[SEVEN] * 200, EIGHT, every=5)
    assert any(changed and 8 in changed for changed in monitored.calls)


async def test_a_kernel_without_nftables_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr("socket.socket", reject)
    calls: list[object] = []
    await RuleMonitor(calls.append).run()
    assert calls == []

"""Messages about qdiscs and filters: which interfaces lost all filters, and those that are lost."""

import asyncio
import socket
import struct

import pytest

from agent.linux import netlink_groups
from agent.linux.traffic_control import TrafficControlMonitor, without_qdisc

NEWQDISC, DELQDISC, DELFILTER = 36, 37, 45
CLSACT = 0xFFFF0000
FQ = 0x80010000


def message(kind: int, ifindex: int, handle: int) -> bytes:
    """As the kernel sends it, without attributes (include/uapi/linux/rtnetlink.h: tcmsg)."""
    return struct.pack("=IHHIIBxxxiIII", 36, kind, 0, 0, 0, 0, ifindex, handle, 0xFFFFFFF1, 1)


@pytest.mark.parametrize(
    ("datagrams", "expected"),
    [
        ([message(DELQDISC, 7, CLSACT)], {7}),
        ([message(DELQDISC, 7, CLSACT), message(DELQDISC, 8, CLSACT)], {7, 8}),
        ([message(DELQDISC, 7, CLSACT) + message(NEWQDISC, 7, CLSACT)], {7}),  # replaced
        ([message(NEWQDISC, 7, CLSACT)], set()),
        ([message(DELFILTER, 7, CLSACT)], set()),
        ([message(DELQDISC, 7, FQ)], set()),
        ([], set()),
    ],
)
def test_filters_are_gone_with_their_qdisc(datagrams: list[bytes], expected: set[int]) -> None:
    assert without_qdisc(datagrams) == expected


async def test_monitor_that_runs_again_reports_that_messages_were_lost() -> None:
    changes: list[set[int] | None] = []
    monitor = TrafficControlMonitor(changes.append)
    for expected in ([], [None]):
        task = asyncio.create_task(monitor.run())
        await asyncio.sleep(0)
        assert changes == expected
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_interfaces_of_all_messages_are_reported_and_a_loss_as_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [message(DELFILTER, 7, CLSACT), message(NEWQDISC, 8, FQ), message(DELQDISC, 7, CLSACT)]
    received = [first, None, [message(NEWQDISC, 9, FQ)]]
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.setblocking(False)
    monkeypatch.setattr(netlink_groups, "joined", lambda protocol, groups: end)

    def next_received(_: socket.socket) -> list[bytes] | None:
        end.recv(16)
        return received.pop(0)

    monkeypatch.setattr(netlink_groups, "received", next_received)
    changes: list[set[int] | None] = []
    with ours, end:
        task = asyncio.create_task(TrafficControlMonitor(changes.append).run())
        for _ in range(3):
            ours.send(b"wake")
            await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert end.fileno() == -1
    assert changes == [{7, 8}, None, {9}]

"""Messages about qdiscs and filters: which interfaces lost all filters, and those that are lost."""

import asyncio
import struct

import pytest

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

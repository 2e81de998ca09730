"""Messages about qdiscs and filters, when the component that reads them starts again."""

import asyncio

from agent.linux.traffic_control import TrafficControlMonitor


async def test_monitor_that_runs_again_reports_that_messages_were_lost() -> None:
    changes: list[set[int] | None] = []
    monitor = TrafficControlMonitor(changes.append)
    for expected in ([], [None]):
        task = asyncio.create_task(monitor.run())
        await asyncio.sleep(0)
        assert changes == expected
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

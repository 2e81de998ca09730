"""The controller of the default-deny table, where the node's mode needs no table."""

import asyncio

from agent.default_deny.controller import DefaultDenyController
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore


async def test_marks_of_pods_do_not_pile_up_without_a_table() -> None:
    store = PodStore(Conditions())
    controller = DefaultDenyController(store)
    task = asyncio.create_task(controller.run())
    for number in range(3):
        store.in_force.mark(f"pod-{number}")
        await asyncio.sleep(0.01)
        assert controller._changes.is_empty
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""Relays of previous agents are forgotten once they have exited, and left alone with the agent."""

from agent.strict.predecessors import Predecessors
from tests.agent.strict.scripted_relay import ScriptedPredecessor


def predecessors(*serving: ScriptedPredecessor) -> Predecessors:
    return Predecessors(serving, have_these_maps=True, now=lambda: 0.0)


async def test_relay_that_has_exited_by_itself_needs_no_wait() -> None:
    relay = ScriptedPredecessor()
    found = predecessors(relay)
    assert not found.may_be_replaced((), lambda: {"198.18.1.1"})
    relay.is_running = False
    await found.kill_overdue()
    assert not found
    assert found.may_be_replaced((), lambda: {"198.18.1.1"})


async def test_released_relay_is_forgotten_once_it_has_exited() -> None:
    relay = ScriptedPredecessor()
    found = predecessors(relay)
    found.release(is_replaced=True, is_needed=True, is_off=False)
    await found.kill_overdue()
    assert found
    relay.is_running = False
    await found.kill_overdue()
    assert not found


def test_agent_that_stops_leaves_them_alone() -> None:
    serving, draining = ScriptedPredecessor(), ScriptedPredecessor()
    draining_only = predecessors(draining)
    draining_only.release(is_replaced=True, is_needed=True, is_off=False)
    for found in (predecessors(serving), draining_only):
        found.forget()
        assert not found
    assert serving.is_forgotten
    assert draining.is_forgotten
    assert not serving.is_released

"""How often a gate is put before others' programs, and what is said when it stays behind."""

import dataclasses
from typing import cast

import pytest

from agent.gates.chain_order import ChainOrder
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from bpf.errors import AttachError

INTERFACE = HostInterface(7, "pgweb")


@dataclasses.dataclass
class Chain:
    """A chain of one interface, and somebody who may jump to its front."""

    is_gate_first: bool = True
    is_contested: bool = False
    is_refused: bool = False
    moves: int = 0
    now: float = 0.0

    async def is_first(self, ifindex: int) -> bool:
        assert ifindex == INTERFACE.ifindex
        return self.is_gate_first

    async def move_first(self, ifindex: int) -> None:
        if self.is_refused:
            raise AttachError("moving the gate of interface 7: No space left on device")
        self.moves += 1
        self.is_gate_first = not self.is_contested


@pytest.fixture
def chain() -> Chain:
    return Chain()


@pytest.fixture
def places(chain: Chain) -> ChainOrder:
    gate_worker, store = cast(GateWorker, chain), PodStore(Conditions())
    return ChainOrder(gate_worker, store, GateMetrics(store), now=lambda: chain.now)


async def test_gate_in_front_stays_where_it_is(chain: Chain, places: ChainOrder) -> None:
    assert await places.ensure_first(INTERFACE) == ""
    assert chain.moves == 0


async def test_gate_behind_another_program_is_moved(chain: Chain, places: ChainOrder) -> None:
    chain.is_gate_first = False
    assert await places.ensure_first(INTERFACE) == ""
    assert chain.moves == 1


async def test_three_moves_a_minute_and_then_it_is_said(chain: Chain, places: ChainOrder) -> None:
    chain.is_contested, chain.is_gate_first = True, False
    said = [await places.ensure_first(INTERFACE) for _ in range(10)]
    assert chain.moves == 3
    assert set(said) == {
        "Another program runs before the gate on pgweb, and packets it accepts pass no "
        "gate; attach it after the gate."
    }
    chain.now = 61
    await places.ensure_first(INTERFACE)
    assert chain.moves == 4


async def test_moves_long_ago_do_not_count(chain: Chain, places: ChainOrder) -> None:
    for minute in range(1, 10):
        chain.now = 61.0 * minute
        chain.is_gate_first = False
        assert await places.ensure_first(INTERFACE) == ""
    assert chain.moves == 9


async def test_gate_that_cannot_be_moved_is_said(chain: Chain, places: ChainOrder) -> None:
    chain.is_gate_first, chain.is_refused = False, True
    said = await places.ensure_first(INTERFACE)
    assert "the gate cannot be moved (moving the gate of interface 7: No space left" in said


async def test_new_interface_of_an_old_number_begins_anew(chain: Chain, places: ChainOrder) -> None:
    chain.is_contested, chain.is_gate_first = True, False
    for _ in range(4):
        await places.ensure_first(INTERFACE)
    places.forget(INTERFACE.ifindex)
    await places.ensure_first(INTERFACE)
    assert chain.moves == 4

"""The gate is moved before other programs, a bounded number of times; else it is a problem."""

import dataclasses
import errno
from collections.abc import Callable
from typing import TypeVar, cast

import pytest
import structlog.testing

from agent.gates.chain_order import _WINDOW_SECONDS, ChainOrder
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.store import PodStore
from bpf.errors import AttachError, BpfError

T = TypeVar("T")

INTERFACE = HostInterface(7, "pgweb")


@dataclasses.dataclass
class Chain:
    """The chain of one interface; a contested one has a program that always moves first."""

    is_gate_first: bool = True
    is_contested: bool = False
    is_rejected: bool = False
    is_removed: bool = False
    is_readable: bool = True
    moves: int = 0
    now: float = 1000.0

    @property
    def gates(self) -> "Chain":
        return self

    async def run(self, function: Callable[[int], T], ifindex: int) -> T:
        return function(ifindex)

    def is_first(self, ifindex: int) -> bool:
        assert ifindex == INTERFACE.ifindex
        if not self.is_readable:
            raise BpfError(errno.ENOMEM, "Cannot allocate memory")
        return self.is_gate_first

    async def move_first(self, ifindex: int) -> None:
        if self.is_rejected:
            raise AttachError("moving the gate of interface 7: No space left on device")
        if self.is_removed:
            cause = BpfError(errno.ENOENT, "No such file or directory")
            raise AttachError("moving the gate of interface 7: No such file") from cause
        self.moves += 1
        self.is_gate_first = not self.is_contested


@pytest.fixture
def chain() -> Chain:
    return Chain()


@pytest.fixture
def chain_order(chain: Chain) -> ChainOrder:
    gate_worker, store = cast(GateWorker, chain), PodStore(Conditions())
    return ChainOrder(gate_worker, GateMetrics(store), now=lambda: chain.now)


async def test_gate_in_front_stays_where_it_is(chain: Chain, chain_order: ChainOrder) -> None:
    assert await chain_order.ensure_first(INTERFACE) == ""
    assert chain.moves == 0


async def test_gate_behind_another_program_is_moved(chain: Chain, chain_order: ChainOrder) -> None:
    chain.is_gate_first = False
    assert await chain_order.ensure_first(INTERFACE) == ""
    assert chain.moves == 1
    (moved,) = chain_order._metrics.gates_reordered.collect()
    assert [sample.value for sample in moved.samples if sample.name.endswith("_total")] == [1]


async def test_a_fourth_move_within_a_minute_is_reported(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_contested, chain.is_gate_first = True, False
    problems = []
    for _ in range(10):
        problems.append(await chain_order.ensure_first(INTERFACE))
        chain.now += 1
    assert chain.moves == 3
    assert set(problems) == {
        "Another program runs before the gate on pgweb, and packets it accepts pass no "
        "gate; attach it after the gate."
    }
    chain.now += 61
    await chain_order.ensure_first(INTERFACE)
    assert chain.moves == 4


async def test_last_move_of_a_minute_waits_for_programs_that_are_attached_one_after_the_other(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_contested, chain.is_gate_first = True, False
    for _ in range(4):
        await chain_order.ensure_first(INTERFACE)
    assert chain.moves == 2
    chain.is_contested = False
    chain.now += 3
    assert await chain_order.ensure_first(INTERFACE) == ""
    assert chain.moves == 3


async def test_moves_long_ago_do_not_count(chain: Chain, chain_order: ChainOrder) -> None:
    for minute in range(1, 10):
        chain.now = 1000.0 + 61 * minute
        chain.is_gate_first = False
        assert await chain_order.ensure_first(INTERFACE) == ""
    assert chain.moves == 9


async def test_a_gate_that_cannot_be_moved_is_reported(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_gate_first, chain.is_rejected = False, True
    problem = await chain_order.ensure_first(INTERFACE)
    assert "the gate cannot be moved (moving the gate of interface 7: No space left" in problem


async def test_a_gate_that_a_deletion_removes_is_no_problem(
    chain: Chain, chain_order: ChainOrder
) -> None:
    """podgate-cni has removed it, and the interface is next."""
    chain.is_gate_first, chain.is_removed = False, True
    with structlog.testing.capture_logs() as lines:
        assert await chain_order.ensure_first(INTERFACE, is_deleting=True) == ""
    assert lines == []
    assert "the gate cannot be moved" in await chain_order.ensure_first(INTERFACE)


async def test_a_new_interface_with_an_old_number_has_no_moves(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_contested, chain.is_gate_first = True, False
    with structlog.testing.capture_logs() as lines:
        for _ in range(4):
            await chain_order.ensure_first(INTERFACE)
        chain_order.forget(INTERFACE.ifindex)
        await chain_order.ensure_first(INTERFACE)
        assert chain.moves == 3
    reported = [line for line in lines if line["event"] is Event.GATE_DISPLACED]
    assert len(reported) == 2


async def test_a_chain_that_cannot_be_read_is_reported_until_it_can(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_readable = False
    with structlog.testing.capture_logs() as lines:
        problems = [await chain_order.ensure_first(INTERFACE) for _ in range(3)]
    assert all("on pgweb cannot be read (Cannot allocate memory)" in text for text in problems)
    assert [line["event"] for line in lines] == [Event.GATE_DISPLACED]
    chain.is_readable = True
    assert await chain_order.ensure_first(INTERFACE) == ""


async def test_program_that_returns_is_logged_again(chain: Chain, chain_order: ChainOrder) -> None:
    def displace() -> None:
        chain.is_contested, chain.is_gate_first = True, False

    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            displace()
            for _ in range(5):
                await chain_order.ensure_first(INTERFACE)
            # It is removed.
            chain.is_gate_first = True
            await chain_order.ensure_first(INTERFACE)
    logged = [line for line in lines if line["event"] is not Event.GATE_MOVED_FIRST]
    assert len(logged) == 2


async def test_gate_is_moved_again_when_the_oldest_of_its_moves_is_long_ago(
    chain: Chain, chain_order: ChainOrder
) -> None:
    chain.is_contested = True
    for now in (1000.0, 1050.0, 1050.0, 1050.0):
        chain.now, chain.is_gate_first = now, False
        await chain_order.ensure_first(INTERFACE, is_deleting=False)
    moves = chain.moves
    chain.now = 1000.0 + _WINDOW_SECONDS + 1
    assert await chain_order.ensure_first(INTERFACE, is_deleting=False)
    assert chain.moves == moves + 1

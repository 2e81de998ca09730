"""Gates whose qdisc was deleted, by the kernel's messages: the order of repairs, and their end."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from agent.gates.lost_filters import LostFilters
from agent.linux import traffic_control
from bpf.errors import AttachError
from bpf.gates import Gates
from tests.agent.linux.test_traffic_control import CLSACT, DELQDISC, message

ENFORCING, RECORDING = True, False


@dataclasses.dataclass
class Node:
    """Gates with filters, and what was done."""

    filtered: set[int] = dataclasses.field(default_factory=lambda: {7, 8})
    results: dict[tuple[int, bool], bool | AttachError] = dataclasses.field(default_factory=dict)
    is_off: bool = False
    calls: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    put_back: list[int] = dataclasses.field(default_factory=list)
    failed: list[set[int]] = dataclasses.field(default_factory=list)
    filters: LostFilters = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.kernel, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    def put_back_after_qdisc(self, ifindex: int, *, is_enforcing: bool) -> bool | AttachError:
        self.calls.append((ifindex, is_enforcing))
        return self.results.get((ifindex, is_enforcing), True)

    def delete_qdisc(self, ifindex: int) -> None:
        self.kernel.send(message(DELQDISC, ifindex, CLSACT))

    async def repair(self) -> None:
        """All that the messages require."""
        self.filters.read()
        while self.filters.next():
            self.filters.read()
        await asyncio.sleep(0)  # for callbacks


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    made = Node()
    monkeypatch.setattr(traffic_control, "joined", lambda: made.socket)
    made.filters = LostFilters(
        cast(Gates, made),
        asyncio.get_running_loop(),
        is_off=lambda: made.is_off,
        on_put_back=made.put_back.append,
        on_failed=made.failed.append,
    )
    with contextlib.closing(made.kernel), contextlib.closing(made.filters):
        yield made


async def test_all_gates_enforce_before_one_records(node: Node) -> None:
    node.delete_qdisc(7)
    node.delete_qdisc(8)
    await node.repair()
    assert [is_enforcing for _, is_enforcing in node.calls] == [True, True, False, False]
    assert sorted(node.put_back) == [7, 8]


async def test_gate_that_is_lost_meanwhile_enforces_before_others_record(node: Node) -> None:
    node.delete_qdisc(7)
    node.filters.read()
    assert node.filters.next()
    node.delete_qdisc(8)
    await node.repair()
    assert node.calls == [(7, ENFORCING), (8, ENFORCING), (7, RECORDING), (8, RECORDING)]


async def test_qdisc_beside_a_link_concerns_no_gate(node: Node) -> None:
    """felix deletes those of all its interfaces."""
    node.delete_qdisc(9)
    await node.repair()
    assert (node.calls, node.put_back) == ([], [])


async def test_gates_that_podgate_off_removes_are_not_put_back(node: Node) -> None:
    node.is_off = True
    node.delete_qdisc(7)
    await node.repair()
    assert node.calls == []


async def test_nothing_is_put_back_once_it_is_stopped(node: Node) -> None:
    """Another agent has the node."""
    node.delete_qdisc(7)
    node.filters.read()
    node.filters.stop()
    await node.repair()
    assert node.calls == []


async def test_gate_that_podgate_cni_has_removed_is_no_repair(node: Node) -> None:
    node.results[7, ENFORCING] = False
    node.delete_qdisc(7)
    await node.repair()
    assert (node.calls, node.put_back, node.failed) == ([(7, ENFORCING)], [], [])


@pytest.mark.parametrize("side", [ENFORCING, RECORDING])
async def test_gate_that_cannot_be_put_back_is_left_to_the_watch(node: Node, side: bool) -> None:
    node.results[7, side] = AttachError("No space left on device")
    node.delete_qdisc(7)
    await node.repair()
    assert (node.put_back, node.failed) == ([], [{7}])

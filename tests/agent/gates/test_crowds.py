"""Many pods at once, with the real store and reconciler on a node in memory, in fake time."""

import asyncio

import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.conditions import TRUE
from agent.pods.pod import Pod
from bpf.verdicts import Mode
from tests.agent.app.node import BUSY, GONE, Node

pytestmark = pytest.mark.looptime

ENFORCED = (TRUE, "Enforced")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def add(node: Node, count: int, *, first: int = 1) -> list[str]:
    names = [f"pod{number}" for number in range(first, first + count)]
    for number, name in enumerate(names, start=first):
        node.add(name, number)
    return names


async def test_gates_of_few_pods_are_settled_from_the_start(node: Node) -> None:
    async with node.running():
        add(node, 3)
        await asyncio.sleep(1)
        assert node.gates.links == {1, 2, 3}
        assert not node.gates.unsettled


async def test_eight_pods_that_wait_are_a_crowd(node: Node) -> None:
    async with node.running():
        add(node, 7)
        await asyncio.sleep(1)
        assert node.gates.links == set(range(1, 8))
        add(node, 8, first=8)
        await asyncio.sleep(1)
        assert node.gates.unsettled


async def test_gates_of_a_crowd_are_attached_quickly_and_settled_when_it_is_over(
    node: Node,
) -> None:
    async with node.running():
        names = add(node, 250)
        await asyncio.sleep(10)
        assert {node.status(name) for name in names} == {ENFORCED}
        assert len(node.gates.unsettled) > 200
        await asyncio.sleep(120)
        assert not node.gates.unsettled
        assert len(node.gates.links) == 250


async def test_pods_of_a_crowd_that_come_with_gaps_are_quick_up_to_the_last(node: Node) -> None:
    async with node.running():
        add(node, 20)
        for number in range(21, 31):
            await asyncio.sleep(2)
            add(node, 1, first=number)
        await asyncio.sleep(0.5)
        assert 30 in node.gates.unsettled


async def test_gates_are_settled_in_a_small_part_of_the_time_also_while_a_crowd_has_no_end(
    node: Node,
) -> None:
    async with node.running():
        add(node, 20)
        for number in range(21, 121):
            await asyncio.sleep(1)
            add(node, 1, first=number)
        settled = sum(call.startswith("settle") for call in node.gates.calls)
        # Each takes 10 ms of the kernel's lock.
        assert 100 <= settled <= 121


async def test_gate_that_cannot_be_settled_is_attached_by_the_pods_next_pass(node: Node) -> None:
    node.gates.failing["settle"] = BUSY
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            add(node, 20)
            await asyncio.sleep(30)
            assert not node.gates.unsettled
    assert Event.GATE_NOT_SETTLED in [line["event"] for line in lines]


async def test_pod_that_ends_before_its_gate_is_settled_is_no_failure(node: Node) -> None:
    node.gates.failing["settle"] = GONE
    node.gates.failing["settle"].__cause__ = OSError(19, "No such device")
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            add(node, 20)
            await asyncio.sleep(30)
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_reply_table_that_fails_delays_no_other_of_its_batch(node: Node) -> None:
    def fail(call: str) -> None:
        if call == "start replies pod7":
            raise BUSY

    node.gates.before_call = fail
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            names = add(node, 20)
            await asyncio.sleep(2)
    ended = {call.removeprefix("end grace ") for call in node.gates.calls if "end grace" in call}
    assert ended == {*names} - {"pod7"}
    failed = [line["pod"] for line in lines if line["event"] is Event.REPLY_TABLE_FAILED]
    assert failed == ["demo/pod7"]


async def test_pod_that_ends_while_its_batch_waits_gets_no_reply_table(node: Node) -> None:
    def remove(call: str) -> None:
        if call == "start replies pod1" and "pod2" in node.store.pods:
            node.remove("pod2")

    node.gates.before_call = remove
    async with node.running():
        add(node, 20)
        await asyncio.sleep(2)
    assert 2 not in node.gates.with_replies
    assert 2 not in node.gates.gates
    assert len(node.gates.with_replies) == 19


async def test_networks_of_pods_without_a_gate_are_read_side_by_side(node: Node) -> None:
    node.read_seconds = 1.0
    # One of them has no namespace yet.
    node.store.set_pod(Pod(uid="first", namespace="demo", name="first", mode=Mode.ENFORCE))
    async with node.running():
        names = add(node, 7)
        await asyncio.sleep(1.5)
        assert {node.status(name) for name in names} == {ENFORCED}


async def test_network_that_changes_while_others_are_read_is_read_again(node: Node) -> None:
    def change(call: str) -> None:
        if call == "install pod1":
            node.set_addresses("pod8", "198.18.9.9")

    node.gates.before_call = change
    async with node.running():
        add(node, 8)
        await asyncio.sleep(2)
    config = node.gates.gates[8]
    assert config is not None
    assert list(map(str, config.addresses)) == ["198.18.9.9"]

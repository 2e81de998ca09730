"""What the reconciler does about gates that fail, on a node in memory and fake time."""

import asyncio
import errno

import msgspec
import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod_state import Admission
from bpf.errors import BpfError
from bpf.rules import Rule, SourceKind
from tests import polling
from tests.agent.app.node import BUSY, ENFORCED, FULL, GONE, Node

pytestmark = pytest.mark.looptime


async def test_a_failed_attach_is_retried_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.gates.failing["install"] = BUSY
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.status("a") == (FALSE, "GateFailed")
        del node.gates.failing["install"]
        await asyncio.sleep(1)
        assert node.status("a") == ENFORCED


def is_gate_lost(node: Node) -> bool:
    return node.store.pods["a"].is_gate_lost


async def test_a_lost_gate_is_reported_and_the_pod_stays_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["install"] = BUSY
        node.gates.gates.clear()
        node.store.mark("a")
        await asyncio.sleep(0.5)
        assert is_gate_lost(node)
        assert node.status("a") == (TRUE, "GateLost")
        assert "veth1 lost its gate" in node.message("a")
        del node.gates.failing["install"]
        await asyncio.sleep(2)
        assert set(node.gates.gates) == {1}
        assert not is_gate_lost(node)
        assert "lost" not in node.message("a")


async def test_a_gate_that_cannot_be_updated_is_not_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["install"] = FULL
        node.set_addresses("a", "198.18.7.7")
        await asyncio.sleep(0.5)
        assert not is_gate_lost(node)
        assert "the map gates is full" in node.message("a")
        assert node.status("a") == ENFORCED
        assert "keeps its last addresses" in node.message("a")
        del node.gates.failing["install"]
        await asyncio.sleep(2)
        assert node.gated_addresses(1) == ["198.18.7.7"]
        assert "keeps its last addresses" not in node.message("a")


async def test_a_gate_that_keeps_failing_is_retried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["install"] = FULL
        node.store.mark("a")
        await asyncio.sleep(120)
        assert 12 <= node.gates.calls.count("install a") <= 30


async def test_what_a_gate_has_no_room_for_is_in_the_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.problem = "2,000 addresses do not fit; all addresses behind it count as the pod's."
    node.add("a", 1)
    async with node.running():
        for _ in range(3):
            await asyncio.sleep(0.5)
            node.store.mark("a")
    assert node.store.pods["a"].gate_problem == node.gates.problem
    assert node.status("a") == ENFORCED
    assert node.gates.problem in node.message("a")


async def test_a_chain_that_cannot_be_read_is_reported_and_no_lost_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.failing["is first"] = BpfError(errno.ENOMEM, "Cannot allocate memory")
    node.add("a", 1)
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            for _ in range(3):
                await asyncio.sleep(0.5)
                node.store.mark("a")
    assert node.status("a") == ENFORCED
    assert "Programs on veth1 cannot be read (Cannot allocate memory)" in node.message("a")
    errors = [line["event"] for line in lines if line["log_level"] != "info"]
    assert errors == [Event.GATE_DISPLACED]


async def test_an_interface_that_is_deleted_during_the_attach_is_no_lost_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)

        def delete(call: str) -> None:
            if call == "install a":
                node.add_netns("a", ifindex=1, has_veth=False)
                node.gates.failing["install"] = GONE

        node.gates.before_call = delete
        with structlog.testing.capture_logs() as lines:
            node.store.mark("a")
            await asyncio.sleep(0.5)
        assert node.status("a") == (FALSE, "NoInterface")
        assert node.gates.gates == {}
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_a_gate_that_a_deletion_removes_before_its_interface_is_no_lost_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        state = node.store.pods["a"]
        node.store.set_pod(msgspec.structs.replace(state.pod, is_deleting=True))
        await asyncio.sleep(0.5)
        del node.gates.gates[1]
        node.gates.failing["install"] = GONE
        with structlog.testing.capture_logs() as lines:
            node.store.mark("a")
            await asyncio.sleep(0.2)
            assert node.status("a") == ENFORCED
            assert "lost" not in node.message("a")
            assert [line for line in lines if line["log_level"] != "info"] == []
            # The interface stays: it is lost indeed.
            await asyncio.sleep(30)
    assert Event.GATE_LOST in [line["event"] for line in lines]


async def test_changed_rules_of_many_pods_are_written_at_once_without_a_pass_over_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    names = [f"pod{number}" for number in range(1, 251)]
    for number, name in enumerate(names, start=1):
        node.add(name, number)
    loop = asyncio.get_running_loop()
    async with node.running():
        await asyncio.sleep(120)
        node.gates.calls.clear()
        node.rules = (Rule(SourceKind.ANY),)
        in_force = node.store.in_force.subscribe()
        started = loop.time()
        for name in names:
            node.store.changed_rules.mark(name)
        await polling.until("all rules", lambda: len(node.gates.calls) == len(names))
        assert loop.time() - started < 0.5
        await asyncio.sleep(1)
        assert node.gates.calls == [f"configure {name}" for name in names]
        assert {config.rules for config in node.gates.gates.values() if config} == {node.rules}
        assert node.store.pods["pod7"].admission == Admission(node.rules)
        assert set(in_force.take()) == set(names)


async def test_pod_whose_gate_is_gone_gets_a_pass_when_its_rules_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(1)
        node.gates.gates.clear()  # removed without a message
        node.rules = (Rule(SourceKind.ANY),)
        node.store.changed_rules.mark("a")
        await asyncio.sleep(1)
        config = node.gates.gates[1]
        assert config is not None
        assert config.rules == node.rules

"""The reconciler with the real store and the real pod gates, on a node in memory and fake time."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest

from agent.gates.grace_periods import GRACE_SECONDS
from agent.pods.conditions import FALSE
from agent.pods.pod import SANDBOX_MISSING, Pod, Problem
from bpf.verdicts import Mode
from tests.agent.app.node import ENFORCED, RESYNC_SECONDS, Node

pytestmark = pytest.mark.looptime

RESYNCS = 2
"""At most, in four minutes."""


@contextlib.asynccontextmanager
async def changing(node: Node, name: str, *, every: float = 0.004) -> AsyncIterator[None]:
    """Have a pod change its addresses 250 times a second, or each time after `every` seconds."""

    async def change() -> None:
        for number in itertools.count():
            node.set_addresses(name, f"198.18.{number >> 8 & 255}.{number & 255}")
            await asyncio.sleep(every)

    task = asyncio.create_task(change())
    try:
        yield
    finally:
        task.cancel()


async def test_each_gate_is_tested_and_gets_its_reply_table_while_others_are_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    for number in range(1, 21):
        node.add(f"pod{number}", number)
    assert node.reconciler.seconds_in_pass() == 0
    async with node.running():
        await asyncio.sleep(3)
        assert node.reconciler.seconds_in_pass() == 0
    calls = [call for call in node.gates.calls if not call.startswith("settle")]
    for number in range(1, 20):
        own, following = f"pod{number}", f"install pod{number + 1}"
        assert calls.index(f"install {own}") < calls.index(f"path test {own}")
        assert calls.index(f"path test {own}") < calls.index(following)
    assert calls.index("end grace pod1") < calls.index("install pod20")
    assert calls[-1] == "end grace pod20"


async def test_no_grace_period_runs_out_before_its_reply_table_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """250 pods at the agent's first start, on a node where one reply table takes 0.3 s."""
    node = Node(monkeypatch)
    node.worker.seconds["fill_reply_table"] = 0.3
    now = asyncio.get_running_loop().time
    happened: dict[str, float] = {}
    node.gates.before_call = lambda call: happened.update({call: now()})
    names = [f"pod{number}" for number in range(1, 251)]
    for number, name in enumerate(names, start=1):
        node.add(name, number)
    async with node.running():
        await asyncio.sleep(300)
    waits = [happened[f"end grace {name}"] - happened[f"install {name}"] for name in names]
    assert max(waits) < GRACE_SECONDS


async def test_only_new_pods_wait_for_others_reply_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that have a gate, nor one for which the runtime waits."""
    node = Node(monkeypatch)
    task = asyncio.create_task(node.reconciler.run())
    for number in range(1, 153):
        node.add(f"pod{number}", number)
    await asyncio.sleep(20)
    assert node.gates.gates.keys() == set(range(1, 153))
    node.set_addresses("pod1", "198.18.9.9")
    await asyncio.sleep(2)
    assert node.gated_addresses(1) == ["198.18.9.9"]
    node.store.awaited.add("awaited")
    node.add("awaited", 200)
    await asyncio.sleep(2)
    assert node.status("awaited") == ENFORCED
    node.add("late", 201)
    await asyncio.sleep(100)
    assert node.status("late") is None
    filling = asyncio.create_task(node.grace_periods.run())
    await asyncio.sleep(10)
    assert node.status("late") == ENFORCED
    task.cancel()
    filling.cancel()
    await asyncio.gather(task, filling, return_exceptions=True)


async def test_no_gate_s_flows_are_recorded_after_its_removal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)

    def remove(call: str) -> None:
        if call == "path test a":
            node.remove("a")

    node.gates.before_call = remove
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(1)
    assert node.gates.gates == {}
    assert node.gates.with_replies == set()


async def test_a_pod_that_keeps_changing_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.add("noisy", 1)
    async with node.running(), changing(node, "noisy"):
        await asyncio.sleep(5)
        node.gates.calls.clear()
        node.add("new", 2)
        await asyncio.sleep(0.5)
        assert node.status("new") == ENFORCED
        assert [call for call in node.gates.calls if call.endswith(" new")] == [
            *("install new", "path test new", "start replies new", "end grace new")
        ]
        assert node.reconciler.seconds_in_pass() < 0.5


async def test_a_pod_that_is_marked_during_each_of_its_reconciles_delays_no_end_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source may mark it, at no pace: each pass handles it once, and does what ends a pass."""
    node = Node(monkeypatch)

    def mark_again(call: str) -> None:
        if call == "install marked":
            node.store.mark("marked")

    node.gates.before_call = mark_again
    node.add("marked", 1)
    async with node.running():
        await asyncio.sleep(1)
        assert node.store.is_synced
        assert node.gates.calls.count("install marked") > 10
        assert node.reconciler.seconds_in_pass() < 0.5


async def test_a_pod_that_keeps_changing_is_reconciled_at_its_own_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("noisy", 1)
    async with node.running():
        async with changing(node, "noisy", every=0.05):
            await asyncio.sleep(60)
            passes = node.gates.calls.count("install noisy")
            assert passes < 25
            await asyncio.sleep(200)
            assert node.gates.calls.count("install noisy") - passes <= 200 / 10 + RESYNCS
        node.set_addresses("noisy", "198.18.9.9")
        await asyncio.sleep(10.5)
        assert node.gated_addresses(1) == ["198.18.9.9"]  # the last change is not lost
        await asyncio.sleep(10)
        node.set_addresses("noisy", "198.18.9.10")
        await asyncio.sleep(0.1)
        assert node.gated_addresses(1) == ["198.18.9.10"]  # it was quiet


async def test_the_first_changes_of_a_pod_are_handled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        for number in range(1, 9):
            await asyncio.sleep(0.2)
            node.set_addresses("a", f"198.18.8.{number}")
            await asyncio.sleep(0.1)
            assert node.gated_addresses(1) == [f"198.18.8.{number}"]


async def test_a_pod_that_waits_is_retried_while_another_keeps_changing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("noisy", 1)
    node.store.set_pod(
        Pod(uid="a", namespace="demo", name="a", mode=Mode.ENFORCE, netns_path="/run/netns/a")
    )
    async with node.running(), changing(node, "noisy"):
        await asyncio.sleep(5)
        node.add_netns("a", ifindex=2)
        await asyncio.sleep(1.5)
        assert node.status("a") == ENFORCED


async def test_a_policy_of_a_pod_that_keeps_changing_is_applied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    pod = node.add("noisy", 1, mode=Mode.AUDIT)
    async with node.running(), changing(node, "noisy"):
        await asyncio.sleep(10)
        node.store.set_pod(msgspec.structs.replace(pod, mode=Mode.ENFORCE))
        await asyncio.sleep(0.2)
        assert node.status("noisy") == ENFORCED


async def test_a_new_pod_is_gated_before_the_rest_of_a_resync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    for number in range(1, 101):
        node.add(f"pod{number}", number)
    async with node.running():
        await asyncio.sleep(60)
        node.store.mark_all()
        await asyncio.sleep(0.1)
        node.add("new", 200)
        await asyncio.sleep(0.2)
        assert node.status("new") == ENFORCED


async def test_a_gated_pod_is_marked_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    changes = node.store.in_force.subscribe()
    node.add("a", 1)
    async with node.running(), asyncio.timeout(1):
        assert await changes.next() == ["a"]
        state = node.store.pods["a"]
        assert node.status("a") == ENFORCED
        assert state.gated_netns == state.netns
        assert state.first_gated_at is not None
        assert node.store.gated_interfaces() == {1}
        assert node.store.pod_of_interface(1) == state.pod


async def test_a_pod_that_waits_for_its_namespace_is_retried_without_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    changes = node.store.in_force.subscribe()
    node.store.set_pod(
        Pod(uid="a", namespace="demo", name="a", mode=Mode.ENFORCE, netns_path="/run/netns/a")
    )
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.status("a") == (FALSE, "NetnsNotFound")
        assert changes.take() == ["a"]
        node.add_netns("a", ifindex=1, has_veth=False)
        await asyncio.sleep(1.1)
        assert node.status("a") == (FALSE, "NoInterface")
        node.add_netns("a", ifindex=1)
        await asyncio.sleep(1.1)
        assert node.status("a") == ENFORCED


async def test_a_pod_without_a_sandbox_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    problem = Problem(SANDBOX_MISSING, "Waiting.")
    node.store.set_pod(Pod(uid="a", namespace="demo", name="a", manifest_problem=problem))
    changes = node.store.in_force.subscribe()
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.status("a") == (FALSE, SANDBOX_MISSING)
        changes.take()
        await asyncio.sleep(RESYNC_SECONDS / 2)
        assert changes.is_empty


async def test_every_pod_is_reconciled_at_each_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(1)
        node.gates.gates.clear()  # removed without a message
        node.gates.calls.clear()
        await asyncio.sleep(RESYNC_SECONDS - 2)
        assert node.gates.gates == {}
        await asyncio.sleep(2)
        assert set(node.gates.gates) == {1}

"""The reconciler with the real store and the real pod gates, on a node in memory and fake time."""

import asyncio
import contextlib
import errno
import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest
import structlog.testing

from agent.gates.grace_periods import GRACE_SECONDS
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod import SANDBOX_MISSING, Pod, Problem
from agent.pods.pod_state import Admission
from bpf.errors import AttachError, BpfError
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from tests import polling
from tests.agent.app.node import BUSY, FULL, GONE, RESYNC_SECONDS, Node

pytestmark = pytest.mark.looptime

ENFORCED = (TRUE, "Enforced")
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


def message(node: Node, name: str) -> str:
    status = node.store.pods[name].status
    assert status is not None
    return status.message


def addresses(node: Node, ifindex: int) -> list[str]:
    config = node.gates.gates[ifindex]
    assert config is not None
    return list(map(str, config.addresses))


async def test_each_gate_is_tested_and_gets_its_reply_table_while_others_are_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    for number in range(1, 21):
        node.add(f"pod{number}", number)
    async with node.running():
        await asyncio.sleep(3)
    calls = node.gates.calls
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
        assert addresses(node, 1) == ["198.18.9.9"]  # the last change is not lost
        await asyncio.sleep(10)
        node.set_addresses("noisy", "198.18.9.10")
        await asyncio.sleep(0.1)
        assert addresses(node, 1) == ["198.18.9.10"]  # it was quiet


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
            assert addresses(node, 1) == [f"198.18.8.{number}"]


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
    node.store.set_pod(
        Pod(uid="a", namespace="demo", name="a", mode=Mode.ENFORCE, netns_path="/run/netns/a")
    )
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.status("a") == (FALSE, "NetnsNotFound")
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


async def test_a_lost_gate_is_an_event_and_the_pod_stays_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["install"] = BUSY
        node.gates.gates.clear()
        node.store.mark("a")
        async with asyncio.timeout(1):
            (event,) = await node.events.next()
        assert (event.uid, event.reason, event.action) == ("a", "GateLost", "Gating")
        assert "veth1" in event.message
        assert node.status("a") == ENFORCED
        assert "veth1 lost its gate" in message(node, "a")
        del node.gates.failing["install"]
        await asyncio.sleep(2)
        assert set(node.gates.gates) == {1}
        assert "lost" not in message(node, "a")


async def test_a_gate_that_cannot_be_updated_is_not_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["install"] = FULL
        node.set_addresses("a", "198.18.7.7")
        async with asyncio.timeout(1):
            (event,) = await node.events.next()
        assert (event.uid, event.reason) == ("a", "GateNotUpdated")
        assert "the map gates is full" in event.message
        assert node.status("a") == ENFORCED
        assert "keeps its last addresses" in message(node, "a")
        del node.gates.failing["install"]
        await asyncio.sleep(2)
        assert addresses(node, 1) == ["198.18.7.7"]
        assert "keeps its last addresses" not in message(node, "a")


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


async def test_what_a_gate_has_no_room_for_is_an_event_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.problem = "2,000 addresses do not fit; all addresses behind it count as the pod's."
    node.add("a", 1)
    async with node.running():
        for _ in range(3):
            await asyncio.sleep(0.5)
            node.store.mark("a")
        (event,) = await node.events.next()
    assert (event.reason, event.message) == ("GateHasNoRoom", node.gates.problem)
    assert node.status("a") == ENFORCED
    assert node.gates.problem in message(node, "a")


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
    assert "Programs on veth1 cannot be read (Cannot allocate memory)" in message(node, "a")
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
            assert "lost" not in message(node, "a")
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


async def test_the_gates_of_a_removed_pod_are_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.remove("a")
        await asyncio.sleep(0.5)
    assert node.gates.gates == {}
    assert node.store.removed == {}


async def test_a_gate_that_cannot_be_detached_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.failing["remove"] = BUSY
        node.remove("a")
        await asyncio.sleep(0.5)
        assert set(node.store.removed) == {"a"}
        del node.gates.failing["remove"]
        await asyncio.sleep(1)
    assert node.gates.gates == {}
    assert node.store.removed == {}


async def test_a_pod_that_is_added_again_keeps_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed manifest is one that is removed and one that is added."""
    node = Node(monkeypatch)
    pod = node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.calls.clear()
        node.store.remove_pod("a")
        node.store.set_pod(msgspec.structs.replace(pod, source="renamed.yaml"))
        await asyncio.sleep(0.5)
    assert "remove a" not in node.gates.calls
    assert set(node.gates.gates) == {1}


async def test_a_pod_that_is_added_again_while_its_gate_is_detached_gets_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    pod = node.add("a", 1)

    def add_again(call: str) -> None:
        if call == "remove a":
            node.store.set_pod(pod)

    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.before_call = add_again
        node.store.remove_pod("a")
        await asyncio.sleep(0.5)
    assert set(node.gates.gates) == {1}
    assert node.store.removed == {}
    assert node.status("a") == ENFORCED


async def test_a_pod_that_is_removed_while_it_is_gated_leaves_no_gate_and_no_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    changes = node.store.in_force.subscribe()

    def remove(call: str) -> None:
        if call == "install a":
            node.remove("a")

    node.gates.before_call = remove
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
    assert node.gates.gates == {}
    assert node.store.pods == {}
    assert all(node.store.get(uid) is None for uid in changes.take())


async def test_the_status_of_a_previous_sandbox_is_not_the_new_one_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    pod = node.add("a", 1)
    second = node.add_netns("second", ifindex=2)
    statuses: list[object] = []

    def replace(call: str) -> None:
        if call == "install a":
            node.store.set_pod(msgspec.structs.replace(pod, netns_path=second))
        if call == "install second":
            statuses.append(node.status("a"))

    node.gates.before_call = replace
    async with node.running():
        await asyncio.sleep(0.5)
    assert statuses == [None]
    status = node.store.pods["a"].status
    assert status is not None
    assert "1002" in status.message


@pytest.mark.parametrize("is_path_known", [True, False], ids=["netns gone", "no sandbox"])
async def test_a_gate_ends_with_its_interface_also_when_the_namespace_was_gone_first(
    monkeypatch: pytest.MonkeyPatch, is_path_known: bool
) -> None:
    node = Node(monkeypatch)
    pod = node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.store.pods["a"].gates
        assert pod.netns_path is not None
        del node.inodes[pod.netns_path]
        if not is_path_known:
            node.store.set_pod(msgspec.structs.replace(pod, netns_path=None))
        node.store.mark("a")
        await asyncio.sleep(0.5)
        # The interface still exists: a namespace that is missing for a moment opens no gate.
        assert node.store.pods["a"].gates
        del node.networks[pod.netns_path]
        node.store.mark("a")
        await asyncio.sleep(0.5)
        assert not node.store.pods["a"].gates
    assert not node.gates.gates


async def test_two_pods_cannot_use_one_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    first = node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        node.store.set_pod(msgspec.structs.replace(first, uid="b", name="b"))
        await asyncio.sleep(0.5)
        assert node.status("b") == (FALSE, "NetnsInUse")
        assert node.status("a") == ENFORCED


async def test_leftovers_are_removed_once_every_pod_is_reconciled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.gates = {1: None, 8: None, 9: None}
    node.store.relay_gates[9] = "podgate0"
    node.source.unready_reason = "API server has not listed the pods yet"
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(3)
        assert set(node.gates.gates) == {1, 8, 9}
        assert not node.store.is_synced
        node.source.unready_reason = None
        await asyncio.sleep(1.5)
        assert set(node.gates.gates) == {1, 9}
        assert node.store.is_synced


async def test_leftovers_stay_while_a_pod_waits_for_its_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.gates = {1: None}
    node.store.set_pod(Pod(uid="a", namespace="demo", name="a", netns_path="/run/netns/a"))
    async with node.running():
        await asyncio.sleep(5)
        assert set(node.gates.gates) == {1}


async def test_gates_of_podgate_cni_are_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.source.unready_reason = "initial sandbox list not finished"
    async with node.running():
        await asyncio.sleep(1)
        node.gates.gates[5] = None  # of a pod that no source has reported yet
        node.source.unready_reason = None
        await asyncio.sleep(3)
        assert set(node.gates.gates) == {5}


async def test_mode_off_removes_the_gate_that_podgate_cni_attaches_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1, mode=Mode.OFF)
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.status("a") == (TRUE, "Off")
        node.gates.gates[1] = None
        await asyncio.sleep(1.5)
        assert node.gates.gates == {}


async def test_a_displaced_gate_is_moved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    node.add("b", 2)
    async with node.running():
        await asyncio.sleep(0.5)
        node.gates.displaced.add(2)
        node.store.mark_interfaces({2})
        await asyncio.sleep(0.5)
        assert [call for call in node.gates.calls if call.startswith("move")] == ["move first b"]


async def test_the_store_is_settled_only_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    seen: list[bool] = []

    def check(call: str) -> None:
        if call.startswith("install"):
            seen.append(node.store.is_settled)

    node.gates.before_call = check
    async with node.running():
        await asyncio.sleep(0.5)
        seen.append(not node.store.is_settled)
        node.add("a", 1)
        seen.append(node.store.is_settled)
        await asyncio.sleep(0.5)
        seen.append(not node.store.is_settled)
    assert len(seen) >= 4
    assert not any(seen)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (OSError(errno.ENODEV, "No such device"), ("info", Event.POD_VANISHED)),
        (OSError(errno.EBUSY, "Device or resource busy"), ("error", Event.GATE_DETACH_FAILED)),
    ],
)
async def test_an_interface_that_vanishes_is_no_error(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, expected: tuple[str, Event]
) -> None:
    node = Node(monkeypatch)
    node.add("a", 1)
    async with node.running():
        await asyncio.sleep(0.5)
        error = AttachError("detaching from interface 1")
        error.__cause__ = cause
        node.gates.failing["remove"] = error
        with structlog.testing.capture_logs() as lines:
            node.remove("a")
            await asyncio.sleep(0.5)
    assert expected in [(line["log_level"], line["event"]) for line in lines]
    assert len([line for line in lines if line["log_level"] != "info"]) == (expected[0] == "error")

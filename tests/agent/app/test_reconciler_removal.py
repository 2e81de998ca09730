"""How the reconciler removes gates, and which stay, on a node in memory and fake time."""

import asyncio
import errno

import msgspec
import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod import Pod
from bpf.errors import AttachError
from bpf.verdicts import Mode
from tests.agent.app.node import BUSY, ENFORCED, Node

pytestmark = pytest.mark.looptime


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


async def test_gate_of_a_previous_agent_that_cannot_be_detached_is_logged_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(monkeypatch)
    node.gates.gates = {9: None}
    node.gates.failing["remove"] = BUSY
    node.add("a", 1)
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            await asyncio.sleep(0.5)
            # Other pods do not wait for it.
            assert node.status("a") == ENFORCED
            del node.gates.failing["remove"]
            await asyncio.sleep(60)
    events = [line["event"] for line in lines]
    assert events.count(Event.LEFTOVERS_NOT_REMOVED) == 1
    assert events.count(Event.STALE_GATE_REMOVED) == 1
    assert set(node.gates.gates) == {1}


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


async def test_pods_that_get_the_inode_numbers_of_one_anothers_previous_namespaces_are_gated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel uses the number of a removed namespace again at once (fs/nsfs.c: ida_alloc)."""
    node = Node(monkeypatch)
    pods = [node.add("a", 1), node.add("b", 2)]
    async with node.running():
        await asyncio.sleep(0.5)
        first, second = (pod.netns_path for pod in pods)
        assert first
        assert second
        numbers = node.inodes[second], node.inodes[first]
        for pod in pods:
            node.store.set_pod(msgspec.structs.replace(pod, netns_path=None))
        node.inodes.clear()
        await asyncio.sleep(0.5)
        assert [node.status(pod.uid) for pod in pods] == [(FALSE, "NetnsMissing")] * 2
        for pod, path, number in zip(pods, (first, second), numbers, strict=True):
            node.inodes[f"{path}-new"] = number
            node.networks[f"{path}-new"] = node.networks[path]
            node.store.set_pod(msgspec.structs.replace(pod, netns_path=f"{path}-new"))
        await asyncio.sleep(0.5)
        assert [node.status(pod.uid) for pod in pods] == [ENFORCED] * 2


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


async def test_another_versions_leftovers_are_removed_soon_after_nothing_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The programs on host devices are replaced beside the pods' gates, at times after them."""
    node = Node(monkeypatch)
    node.add("a", 1)
    node.gates.is_clean = False
    async with node.running():
        await asyncio.sleep(0.5)
        assert node.gates.calls.count("collect") == 1
        node.gates.is_clean = True
        await asyncio.sleep(5)
        assert node.gates.calls.count("collect") == 2
        await asyncio.sleep(100)
    assert node.gates.calls.count("collect") == 2

"""What a change costs: counts of pods read and encoded, of all those on the node."""

from typing import Any

import pytest

from agent.api.podinfo import pod_messages
from agent.api.podinfo.observed_pods import ObservedPod, PodObserver
from agent.api.podinfo.publisher import PodsSnapshot
from tests import polling
from tests.agent.api.podinfo.serving import Node

_PODS = 250


async def _revision_after(node: Node, rev: int) -> None:
    await polling.until("a revision", lambda: node.publisher.rev > rev)


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of pods in the order in which they are observed."""
    found: list[str] = []
    actual = PodObserver.observe

    def observe(self: PodObserver, record: object, now: object) -> object:
        found.append(record.identity[2])  # type: ignore[attr-defined]
        return actual(self, record, now)  # type: ignore[arg-type]

    monkeypatch.setattr(PodObserver, "observe", observe)
    return found


async def test_change_reads_only_the_pod_that_changed(node: Node, observed: list[str]) -> None:
    pods = [node.add(f"pod{number}") for number in range(_PODS)]
    async with node.serving():
        assert len(observed) == _PODS
        observed.clear()
        for pod in pods[:20]:
            node.records.read, rev = 0, node.publisher.rev
            node.set(pod, False)
            await _revision_after(node, rev)
            assert node.records.read == 1
        assert observed == [pod.name for pod in pods[:20]]


async def test_crowd_costs_as_many_reads_as_it_has_changes(node: Node, observed: list[str]) -> None:
    """Pods that come one after the other, each read once: not all of them again each time."""
    async with node.serving():
        for number in range(_PODS):
            rev = node.publisher.rev
            node.add(f"pod{number}")
            await _revision_after(node, rev)
        assert node.records.read == len(observed) == _PODS


async def test_lists_are_joined_for_clients_only(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []
    response: Any = vars(PodsSnapshot)["response"]
    actual = response.func

    def join(snapshot: PodsSnapshot) -> Any:
        joined.append(snapshot.rev)
        return actual(snapshot)

    monkeypatch.setattr(response, "func", join)
    pods = [node.add(f"pod{number}") for number in range(5)]
    async with node.serving() as calls:
        for pod in pods:
            rev = node.publisher.rev
            node.set(pod, False)
            await _revision_after(node, rev)
        assert joined == []
        await calls.listed()
        await calls.listed()
        assert joined == [node.publisher.rev]


async def test_hint_without_a_change_is_no_revision(node: Node) -> None:
    web = node.add("web")
    async with node.serving():
        rev = node.publisher.rev
        node.change(web.uid)
        node.change("unknown")
        await polling.until("both are read", lambda: node.records.read >= 3)
        assert node.publisher.rev == rev


async def test_pods_are_encoded_for_clients_only_and_once_for_each_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    actual = pod_messages.encode

    def encode(pod: ObservedPod) -> bytes:
        encoded.append(pod.identity[2])
        return actual(pod)

    monkeypatch.setattr(pod_messages, "encode", encode)
    pods = [node.add(f"pod{number}") for number in range(5)]
    async with node.serving() as calls:
        assert encoded == []
        await calls.listed()
        assert sorted(encoded) == [pod.name for pod in pods]
        encoded.clear()
        rev = node.publisher.rev
        node.set(pods[3], False)
        await _revision_after(node, rev)
        await calls.listed()
        await calls.got(pods[3].uid)
        assert encoded == [pods[3].name]

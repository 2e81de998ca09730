"""The pods of gated interfaces: what is kept from one change to the next equals a new reading."""

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.admin.observations import ObservedPod
from agent.drops import history
from agent.drops.history import SourceHistory
from agent.drops.merging import observed_pod
from agent.linux.pod_network import HostInterface
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore

_UIDS = st.sampled_from(["a", "b", "c"])
_NAMESPACES = st.sampled_from(["shop", "edge"])
_LABELS = st.dictionaries(st.sampled_from(["app", "tier"]), st.sampled_from("xy"), max_size=2)
_CHANGES = st.one_of(
    st.tuples(st.just("set"), _UIDS, _NAMESPACES, _LABELS),
    st.tuples(st.just("gate"), _UIDS, st.integers(1, 6)),
    st.tuples(st.just("remove"), _UIDS),
    st.tuples(st.just("forget"), _UIDS),
    st.tuples(st.just("namespace"), _NAMESPACES, _LABELS),
    st.tuples(st.just("read")),
)


class Node:
    """A store, labels, and the history that reads both."""

    def __init__(self) -> None:
        self.store = PodStore(Conditions())
        self.labels = ObjectLabels()
        unused: Any = None
        self.history = SourceHistory(
            unused, unused, state=pathlib.Path("unused"), store=self.store, labels=self.labels
        )

    def apply(self, change: tuple[Any, ...]) -> None:
        match change:
            case "set", uid, namespace, labels:
                self.store.set_pod(Pod(uid=uid, namespace=namespace, name=uid, labels=labels))
            case "gate", uid, ifindex if state := self.store.get(uid):
                state.gates[ifindex] = HostInterface(ifindex, f"veth{ifindex}")
            case "remove", uid:
                self.store.remove_pod(uid)
            case "forget", uid:
                self.store.removed.pop(uid, None)
            case "namespace", name, labels:
                self.labels.set_namespace(name, labels)
            case ("read",):
                self.history._gated_pods()

    def read_again(self) -> dict[int, ObservedPod]:
        states = (*self.store.removed.values(), *self.store.states())
        labels = self.labels.snapshot()
        return {
            ifindex: observed_pod(state.pod, labels) for state in states for ifindex in state.gates
        }


@given(st.lists(_CHANGES, max_size=30))
def test_pods_after_any_changes_are_as_read_again(changes: list[tuple[Any, ...]]) -> None:
    node = Node()
    for change in changes:
        node.apply(change)
    assert node.history._gated_pods() == node.read_again()


def test_interface_of_a_running_pod_is_not_that_of_a_removed_one() -> None:
    node = Node()
    for uid in "ab":
        node.apply(("set", uid, "shop", {}))
        node.apply(("gate", uid, 1))
    node.apply(("remove", "a"))
    assert node.history._gated_pods(["a"]) == {}
    assert node.history._gated_pods(["a", "b"]) == node.read_again()


def test_only_changed_pods_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    read: list[str] = []

    def counted(pod: Pod, labels: Any) -> Any:
        read.append(pod.uid)
        return observed_pod(pod, labels)

    monkeypatch.setattr(history, "observed_pod", counted)
    for number, uid in enumerate("abc"):
        node.apply(("set", uid, "shop", {}))
        node.apply(("gate", uid, number))
    node.history._gated_pods()
    assert sorted(read) == ["a", "b", "c"]

    read.clear()
    node.apply(("set", "b", "shop", {"app": "x"}))
    node.history._gated_pods()
    assert read == ["b"]

    node.apply(("namespace", "shop", {"team": "red"}))
    node.history._gated_pods()
    assert sorted(read) == ["a", "b", "b", "c"]


def test_only_pods_that_changed_are_read() -> None:
    node = Node()
    for number, uid in enumerate("abc", start=1):
        node.apply(("set", uid, "shop", {}))
        node.apply(("gate", uid, number))
    every = node.history._gated_pods()
    assert every.keys() == {1, 2, 3}
    node.apply(("remove", "c"))
    assert node.history._gated_pods(["b", "c", "gone"]) == {2: every[2], 3: every[3]}
    node.apply(("namespace", "shop", {"team": "x"}))
    assert node.history._gated_pods(["b"]).keys() == {1, 2, 3}

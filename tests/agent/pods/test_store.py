"""What a deleted pod leaves in the store: nothing but its gates to detach."""

from agent.labels import ISOLATION_READY
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import IsolationStatus
from agent.pods.store import PodStore


def gated(netns_path: str = "/run/netns/web") -> PodStore:
    """A store with one pod, whose condition is published."""
    store = PodStore(Conditions())
    pod = Pod(uid="u", namespace="shop", name="web", netns_path=netns_path)
    store.set_pod(pod)
    store.pods["u"].status = IsolationStatus(TRUE, "Enforced", "Gate attached.")
    store.conditions.set(pod, ISOLATION_READY, TRUE, "Enforced", "Gate attached.")
    return store


def test_conditions_of_a_deleted_pod_are_forgotten() -> None:
    store = gated()
    state = store.pods["u"]
    store.remove_pod("u")
    assert store.get("u") is None
    assert not store.conditions.of("u")
    assert store.removed == {"u": state}
    store.remove_pod("u")
    assert store.removed == {"u": state}


def test_conditions_of_another_sandbox_are_not_the_new_ones() -> None:
    store = gated()
    changed = Pod(uid="u", namespace="shop", name="web", netns_path="/run/netns/next")
    store.set_pod(changed)
    assert store.pods["u"].status is None
    assert not store.conditions.of("u")


def test_changed_pod_in_the_same_sandbox_keeps_its_conditions() -> None:
    store = gated()
    changed = Pod(
        uid="u", namespace="shop", name="web", netns_path="/run/netns/web", labels={"a": "b"}
    )
    store.set_pod(changed)
    assert store.pods["u"].status is not None
    assert len(store.conditions.of("u")) == 1

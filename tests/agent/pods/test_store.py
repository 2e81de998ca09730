"""What a deleted pod leaves in the store, nothing but its gates to detach, and which pods a change
marks."""

from agent.labels import ISOLATION_READY
from agent.linux.pod_network import PodNetwork
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


def network(nsid: int) -> PodNetwork:
    return PodNetwork((), (), (), nsid)


async def test_change_in_a_namespace_marks_its_pod_alone() -> None:
    store = PodStore(Conditions())
    for number in range(3):
        name = f"web{number}"
        store.set_pod(Pod(uid=name, namespace="shop", name=name, netns_path=f"/run/netns/{name}"))
        store.pods[name].network = network(number)
    store.to_reconcile.take()
    store.mark_namespace(1)
    assert store.to_reconcile.take() == ["web1"]


async def test_change_in_an_unknown_namespace_marks_pods_whose_namespace_was_not_read() -> None:
    store = PodStore(Conditions())
    store.set_pod(Pod(uid="read", namespace="shop", name="read", netns_path="/run/netns/read"))
    store.set_pod(Pod(uid="new", namespace="shop", name="new", netns_path="/run/netns/new"))
    store.set_pod(Pod(uid="waits", namespace="shop", name="waits"))
    store.pods["read"].network = network(1)
    store.to_reconcile.take()
    store.mark_namespace(2)
    assert store.to_reconcile.take() == ["new"]

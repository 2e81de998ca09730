"""What a deleted pod leaves in the store, nothing but its gates to detach, and which pods a change
marks."""

import ipaddress
import os
import pathlib

import msgspec
import pytest
import structlog.testing

from agent.labels import ISOLATION_READY
from agent.linux.pod_network import HostInterface, PodNetwork
from agent.logs import Event
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import SANDBOX_MISSING, Pod, Problem
from agent.pods.pod_state import AddressClaims, IsolationStatus
from agent.pods.store import RELAY, PodStore
from bpf.verdicts import Mode
from probes.netns import Netns


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
    changes = store.desired.subscribe()
    with structlog.testing.capture_logs() as lines:
        store.remove_pod("u")
        assert (store.get("u"), store.pod("u")) == (None, None)
        assert not store.conditions.of("u")
        assert store.removed == {"u": state}
        assert changes.take() == ["u"]
        store.remove_pod("u")
        assert (store.removed, changes.take()) == ({"u": state}, [])
    found = [(one["event"], one["pod"], one["uid"]) for one in lines]
    assert found == [(Event.POD_REMOVED, "shop/web", "u")]


async def test_changes_in_the_network_of_a_deleted_pod_mark_nothing() -> None:
    store = gated()
    # The last one waits, since they come too fast.
    for _ in range(9):
        store.network_changes.mark("u")
    assert store.network_changes.mark_due() is not None
    store.remove_pod("u")
    assert store.network_changes.mark_due() is None


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


ADDRESS = ipaddress.ip_address("198.18.1.1")


@pytest.fixture
def node() -> PodStore:
    """A pod in each mode, and a relay; the interface of each is numbered as its mode, from 10 on.
    Nothing is marked."""
    store = PodStore(Conditions())
    for mode in Mode:
        name, ifindex = mode.label, 10 + mode
        store.set_pod(Pod(uid=name, namespace="shop", name=name, mode=mode, netns_path=f"/{name}"))
        state = store.pods[name]
        state.gated_netns = Netns(f"/{name}", 4, ifindex)
        if mode is Mode.OFF:
            state.ungated_interfaces = frozenset({ifindex})
        else:
            state.gates = {ifindex: HostInterface(ifindex, f"veth{ifindex}")}
    store.pods["strict"].claims = AddressClaims((ADDRESS,))
    store.relay_gates[99] = "podgate0"
    store.to_reconcile.take()
    return store


def test_interfaces_are_those_with_a_gate_that_drops_and_without(node: PodStore) -> None:
    assert node.gated_interfaces() == {11, 12, 13, 99}
    assert node.enforced_interfaces() == {12, 13, 99}
    assert node.ungated_interfaces() == {10}


def test_interface_is_that_of_its_pod_or_of_a_relay(node: PodStore) -> None:
    found = {ifindex: node.pod_of_interface(ifindex) for ifindex in (10, 11, 12, 99)}
    audit, enforce = node.pod("audit"), node.pod("enforce")
    assert found == {10: None, 11: audit, 12: enforce, 99: RELAY}


def test_addresses_are_those_that_are_confirmed(node: PodStore) -> None:
    assert node.confirmed_addresses() == {ADDRESS}
    assert node.own_addresses("strict") == (str(ADDRESS),)
    assert node.own_addresses("audit") == node.own_addresses("unknown") == ()


def test_only_pods_with_a_gate_on_these_interfaces_are_marked(node: PodStore) -> None:
    node.mark_interfaces({10, 12, 13})
    assert node.to_reconcile.take() == ["enforce", "strict"]
    node.mark_all()
    assert node.to_reconcile.take() == ["off", "audit", "enforce", "strict"]
    node.mark("audit")
    assert node.to_reconcile.take() == ["audit"]


async def test_pods_that_wait_for_something_are_marked_again(node: PodStore) -> None:
    node.mark_pending()
    assert node.to_reconcile.is_empty
    node.pods["audit"].gated_netns = None
    node.pods["enforce"].has_failed = True
    node.pods["strict"].claims = AddressClaims((ADDRESS,), is_settling=True)
    node.mark_pending()
    assert node.to_reconcile.take() == ["audit", "enforce", "strict"]


@pytest.mark.parametrize(
    "changes",
    [
        {"host_network": True},
        {"manifest_problem": Problem(SANDBOX_MISSING, "It has none.")},
    ],
)
def test_pod_without_a_network_of_its_own_waits_for_nothing(
    node: PodStore, changes: dict[str, object]
) -> None:
    state = node.pods["audit"]
    state.gated_netns = None
    assert state.is_pending
    state.pod = msgspec.structs.replace(state.pod, **changes)
    assert not state.is_pending


def test_store_is_settled_once_all_that_was_marked_is_reconciled(node: PodStore) -> None:
    found = [node.is_settled]
    node.synced.set()
    found.append(node.is_settled)
    node.is_reconciling = True
    found.append(node.is_settled)
    node.is_reconciling = False
    for queue in (node.to_reconcile, node.changed_rules):
        queue.mark("audit")
        found.append(node.is_settled)
        queue.take()
        found.append(node.is_settled)
    assert found == [False, True, False, False, True, False, True]


def test_pod_that_comes_back_continues_with_its_gates(node: PodStore) -> None:
    state = node.pods["strict"]
    node.remove_pod("strict")
    assert node.to_reconcile.take() == ["strict"]
    node.set_pod(state.pod)
    assert node.pods["strict"] is state
    assert node.removed == {}
    assert node.to_reconcile.take() == ["strict"]


def test_namespace_belongs_to_another_pod_while_it_exists(
    node: PodStore, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "ns"
    file.touch()
    found = os.stat(file)
    netns = Netns(str(file), found.st_dev, found.st_ino)
    mine, other = node.pods["audit"], node.pods["strict"]
    mine.netns = netns
    assert node.netns_owner(netns, other.pod) is mine.pod
    assert node.netns_owner(netns, mine.pod) is None
    for device, inode in ((netns.device + 1, netns.inode), (netns.device, netns.inode + 1)):
        assert node.netns_owner(Netns(str(file), device, inode), other.pod) is None
    file.unlink()
    assert node.netns_owner(netns, other.pod) is None

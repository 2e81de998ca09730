"""Pods by name: what is known of them from the agent's report and its saved state."""

import ipaddress

import msgspec

from agent.admin.observations import ObservedPod
from agent.operate.explain.pods import NamedPods
from tests.agent.operate.cli import reports

ADDRESS = ipaddress.ip_address("198.18.1.7")


def test_pod_of_a_manifest_has_the_labels_that_the_agent_saved() -> None:
    """Else its suggested policy would select the whole namespace."""
    (status, *_) = reports.STATUS.pods
    labels = {"app": "web"}
    saved = ObservedPod(namespace=status.namespace, name=status.name, labels=labels)
    found = NamedPods(reports.STATUS, None, [(saved, (ADDRESS,))])
    pod = found.find(f"{status.namespace}/{status.name}")
    assert (pod.labels, pod.status) == (labels, status)


def test_address_is_that_of_the_pod_for_which_it_is_confirmed() -> None:
    """Not of another one whose network namespace has it, too."""
    (status, *_) = reports.STATUS.pods
    owner = msgspec.structs.replace(status, uid="1", name="owner", addresses=[str(ADDRESS)])
    claims = msgspec.structs.replace(
        status, uid="2", name="claims", addresses=[], unconfirmed={str(ADDRESS): "no source"}
    )
    both = NamedPods(msgspec.structs.replace(reports.STATUS, pods=[owner, claims]), None)
    found = both.with_address(ADDRESS)
    assert found is not None
    assert found.name == "owner"
    claiming = both.find("claims")
    assert (claiming.addresses, claiming.own_addresses) == ((ADDRESS,), ())
    alone = NamedPods(msgspec.structs.replace(reports.STATUS, pods=[claims]), None)
    assert alone.with_address(ADDRESS) == claiming


def test_pod_that_only_the_saved_state_has_is_found_by_its_address() -> None:
    saved = ObservedPod(namespace="shop", name="gone", labels={"app": "web"})
    found = NamedPods(None, None, [(saved, (ADDRESS,))]).with_address(ADDRESS)
    assert found is not None
    assert (found.full_name, found.labels) == ("shop/gone", {"app": "web"})

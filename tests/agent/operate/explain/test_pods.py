"""Pods by name: what is known of them from the agent's report and its saved state."""

import ipaddress
import pathlib
from typing import Any

import msgspec
import pytest

from agent.admin.observations import ObservedPod
from agent.kube.objects import (
    ApiPod,
    ApiPodSpec,
    ApiPodStatus,
    MetadataOnly,
    ObjectMetadata,
    PodIp,
)
from agent.kube.saved_pods import SavedObjects, SavedPods
from agent.operate.explain.pods import NamedPod, NamedPods, PodNotFoundError, read_saved
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


def api_pod(name: str, *addresses: str, namespace: str = "shop", **fields: Any) -> ApiPod:
    return ApiPod(
        metadata=ObjectMetadata(name=name, namespace=namespace, uid=name, labels={"app": name}),
        spec=ApiPodSpec(host_network=bool(fields.pop("host_network", False))),
        status=ApiPodStatus(pod_ips=tuple(PodIp(one) for one in addresses), **fields),
    )


def test_pod_is_found_by_its_name_alone_if_no_other_has_it() -> None:
    pods = [api_pod("web"), api_pod("db"), api_pod("web", namespace="edge")]
    pods[2] = msgspec.structs.replace(
        pods[2], metadata=msgspec.structs.replace(pods[2].metadata, uid="other")
    )
    known = NamedPods(None, SavedPods(node_name="node", pods=pods))
    assert known.find("db").full_name == known.find("shop/db").full_name == "shop/db"
    assert known.find("edge/web").full_name == "edge/web"
    several = "several pods are named web; use one of edge/web, shop/web"
    with pytest.raises(PodNotFoundError, match=f"^{several}$"):
        known.find("web")
    with pytest.raises(PodNotFoundError, match=r"^no pod shop/cache is known on this node; "):
        known.find("shop/cache")


def test_saved_pod_has_the_fields_of_its_object() -> None:
    labels = SavedObjects(objects=[MetadataOnly(ObjectMetadata(name="shop", labels={"a": "b"}))])
    one = api_pod("web", "198.18.1.7", "fd00:18::7", host_network=True)
    known = NamedPods(None, SavedPods(node_name="node", pods=[one], namespaces=labels))
    assert known.namespace_labels == {"shop": {"a": "b"}}
    assert known.find("web") == NamedPod(
        namespace="shop",
        name="web",
        uid="web",
        addresses=(ADDRESS, ipaddress.ip_address("fd00:18::7")),
        labels={"app": "web"},
        host_network=True,
        saved=one,
    )


def test_report_has_the_addresses_and_the_object_the_labels() -> None:
    (status, *_) = reports.STATUS.pods
    status = msgspec.structs.replace(
        status, uid="web", namespace="shop", name="web", addresses=["198.18.1.8"]
    )
    report = msgspec.structs.replace(reports.STATUS, pods=[status])
    one = api_pod("web", "198.18.1.7", host_network=True)
    found = NamedPods(report, SavedPods(node_name="node", pods=[one])).find("web")
    assert found == NamedPod(
        namespace="shop",
        name="web",
        uid="web",
        addresses=(ipaddress.ip_address("198.18.1.8"),),
        labels={"app": "web"},
        host_network=True,
        status=status,
        saved=one,
    )
    # What an agent has saved of a gate adds nothing to the object's labels.
    gated = ObservedPod(namespace="shop", name="web", labels={"app": "old"})
    saved = SavedPods(node_name="node", pods=[one])
    assert NamedPods(report, saved, [(gated, (ADDRESS,))]).find("web") == found


@pytest.mark.parametrize(("reason", "host_network"), [("HostNetwork", True), ("Enforced", False)])
def test_pod_of_a_manifest_is_on_the_host_network_by_its_condition(
    reason: str, host_network: bool
) -> None:
    (status, *_) = reports.STATUS.pods
    conditions = [msgspec.structs.replace(status.conditions[0], reason=reason)]
    status = msgspec.structs.replace(status, conditions=conditions)
    report = msgspec.structs.replace(reports.STATUS, pods=[status])
    found = NamedPods(report, None).find(status.name)
    assert (found.host_network, found.labels, found.saved) == (host_network, {}, None)


def test_address_of_two_pods_is_of_none_and_that_of_the_host_of_no_pod() -> None:
    pods = [api_pod("a", str(ADDRESS)), api_pod("b", "198.18.1.8")]
    hosted = api_pod("host", str(ADDRESS), host_network=True)
    known = NamedPods(None, SavedPods(node_name="node", pods=[*pods, hosted]))
    found = known.with_address(ADDRESS)
    assert found is not None
    assert found.name == "a"
    assert known.with_address(ipaddress.ip_address("198.18.1.9")) is None
    pods.append(api_pod("c", str(ADDRESS)))
    assert NamedPods(None, SavedPods(node_name="node", pods=pods)).with_address(ADDRESS) is None


def test_pod_of_a_cgroup_is_that_of_its_uid() -> None:
    uid = "0123abcd-0123-4567-89ab-0123456789ab"
    one = api_pod("web")
    one = msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, uid=uid))
    known = NamedPods(None, SavedPods(node_name="node", pods=[one]))
    found = known.of_cgroup(f"/kubepods/pod{uid}/x")
    assert found is not None
    assert found.name == "web"
    assert known.of_cgroup("/system.slice") is None


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"pods": 1}'])
def test_saved_pods_that_cannot_be_read_are_none(
    tmp_path: pathlib.Path, content: bytes | None
) -> None:
    (tmp_path / "state").mkdir()
    if content is not None:
        (tmp_path / "state" / "pods.json").write_bytes(content)
    assert read_saved(tmp_path) is None


def test_saved_pods_are_read(tmp_path: pathlib.Path) -> None:
    saved = SavedPods(node_name="node", pods=[api_pod("web")])
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "pods.json").write_bytes(msgspec.json.encode(saved))
    found = read_saved(tmp_path)
    assert found is not None
    assert [pod.metadata.name for pod in found.pods] == ["web"]

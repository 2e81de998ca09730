"""What policies would have admitted of observed flows."""

from typing import Any

import pytest

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.policy import api_types, replay
from agent.policy.api_types import Policy
from tests.agent.policy.observing import WEB, flows

HOST = ObservedPod(namespace="edge", name="ingress", labels={"app": "ingress"}, host_network=True)


def policy(source: dict[str, Any], *ports: dict[str, Any], namespace: str = "shop") -> Policy:
    spec = {"pods": {"namespaces": [namespace]}, "from": [source]}
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "a"},
        "spec": spec | ({"ports": list(ports)} if ports else {}),
    }
    return api_types.read(document, source="test")


def of(path: str, match: str = "exact") -> dict[str, Any]:
    return {"cgroup": {"path": path, "match": match}}


@pytest.mark.parametrize(
    ("source", "cgroup", "is_admitted"),
    [
        (of("/a/b"), "/a/b", True),
        (of("/a/b"), "/a/b/c", False),
        (of("/a/b"), "/a", False),
        (of("/a/b", "subtree"), "/a/b", True),
        (of("/a/b", "subtree"), "/a/b/c/d", True),
        (of("/a/b", "subtree"), "/a/bc", False),
        (of("/a/b", "subtree"), "/a", False),
        ({"systemdUnit": {"name": "a.service"}}, "/system.slice/a.service", True),
        ({"systemdUnit": {"name": "a.service"}}, "/system.slice/a.service/child", True),
        ({"systemdUnit": {"name": "a.service"}}, "/user/a.service", False),
        ({"systemdUnit": {"name": "a.service"}}, "(gone)", False),
    ],
)
def test_source_is_admitted_by_its_cgroup(
    source: dict[str, Any], cgroup: str, *, is_admitted: bool
) -> None:
    assert replay.is_admitted([policy(source)], flows(cgroup)) is is_admitted
    assert replay.is_listed([policy(source)], flows(cgroup)) is is_admitted


def test_source_is_listed_whatever_port_and_admitted_to_its_own() -> None:
    made = [policy(of("/a"), {"port": 80}, {"port": 53, "protocol": "UDP"})]
    assert replay.is_admitted(made, flows("/a"))
    assert replay.is_admitted(made, flows("/a", 17, 53))
    for protocol, port in ((6, 81), (17, 80), (6, 53), (1, 0)):
        assert not replay.is_admitted(made, flows("/a", protocol, port))
        assert replay.is_listed(made, flows("/a", protocol, port))
    assert not replay.is_listed(made, flows("/b"))


def test_policy_of_other_pods_admits_nothing() -> None:
    made = [policy(of("/a"), namespace="else")]
    assert not replay.selects(made[0], WEB)
    assert not replay.is_admitted(made, flows("/a"))
    assert not replay.is_listed(made, flows("/a"))


@pytest.mark.parametrize(
    ("source_pod", "is_admitted"),
    [
        (HOST, True),
        (None, False),
        (
            ObservedPod(namespace="edge", name="x", labels={"app": "other"}, host_network=True),
            False,
        ),
        (ObservedPod(namespace="shop", name="x", labels=HOST.labels, host_network=True), False),
        # Its own network is not the host's.
        (ObservedPod(namespace="edge", name="x", labels=HOST.labels), False),
    ],
)
def test_pod_of_the_host_network_is_admitted_by_its_labels(
    source_pod: ObservedPod | None, *, is_admitted: bool
) -> None:
    pods = {"namespaces": ["edge"], "podSelector": {"matchLabels": {"app": "ingress"}}}
    found = flows("/kubepods/pod1/x", source_pod=source_pod)
    assert replay.is_admitted([policy({"hostNetworkPods": pods})], found) is is_admitted


def test_port_by_its_name_is_that_of_the_pod() -> None:
    named = ObservedPod(
        namespace="shop",
        name="web",
        labels={},
        named_ports=(("http", "TCP", 8080), ("http", "UDP", 9), ("other", "TCP", 7)),
    )
    made = [policy(of("/a"), {"port": "http"})]
    found = [
        port for port in (7, 9, 8080) if replay.is_admitted(made, flows("/a", 6, port, pod=named))
    ]
    assert found == [8080]


def has_destination(made: Policy, found: ObservedFlows) -> bool:
    return any(replay.has_destination(rule, found) for rule in made.rules)


def test_destination_is_a_matter_of_protocol_and_port_alone() -> None:
    made = policy(of("/a"), {"port": 80})
    assert has_destination(made, flows("/other"))
    assert not has_destination(made, flows("/other", 6, 81))
    assert not has_destination(made, flows("/a", 17, 80))


@pytest.mark.parametrize(
    ("path", "units"),
    [
        ("/system.slice/a.service", ["system.slice", "a.service"]),
        ("/system.slice/a-b.slice/x.scope/y.service", ["system.slice", "a-b.slice", "x.scope"]),
        ("/a.service/b.service", ["a.service"]),
        ("/user/a.service", []),
        ("/kubepods.slice/kubepods-pod1.slice", []),
        ("/", []),
        ("(gone)", []),
    ],
)
def test_units_end_where_others_than_systemd_make_cgroups(path: str, units: list[str]) -> None:
    assert list(replay.units(path)) == units

"""Which policies almost admit a flow, and why they do not."""

from typing import Any

import msgspec
import pytest

from agent.admin.observations import ObservedPod
from agent.policy import api_types
from agent.policy.api_types import Policy
from agent.policy.near_misses import Miss, near_misses
from tests.agent.policy.observing import IN_POD, flows

SERVICE = "/system.slice/backup.service"
SCRAPER = ObservedPod(
    namespace="mon",
    name="scraper-x7",
    labels={"app": "scraper", "tier": "b"},
    namespace_labels={"team": "sre"},
    host_network=True,
)
UNIT = {"systemdUnit": {"name": "backup.service"}}
SHOP = {"namespaces": ["shop"]}
EIGHTY = [{"port": 80}]


def policy(
    source: dict[str, Any],
    pods: dict[str, Any] | None = None,
    ports: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> Policy:
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "backup"},
        "spec": {"pods": pods or SHOP, "from": [source], "ports": ports or EIGHTY, **spec},
    }
    return api_types.read(document, source="")


def misses(*policies: Policy, **fields: Any) -> list[tuple[Miss, str]]:
    """Of flows by backup.service to TCP port 80 of shop/web."""
    seen = flows(fields.pop("cgroup", SERVICE), **fields)
    return [(one.miss, one.text) for one in near_misses(policies, seen, {"zone": "a"})]


def test_other_port_is_named_beside_those_that_are_admitted() -> None:
    ports: list[dict[str, Any]] = [
        {"port": 9090},
        {"port": 9100, "endPort": 9110},
        {"protocol": "UDP", "port": 80},
    ]
    assert misses(policy(UNIT, ports=ports)) == [
        (
            Miss.PORT,
            "admits this source to TCP 9090, TCP 9100-9110, UDP 80, not to TCP 80",
        )
    ]


def test_port_by_a_name_that_the_pod_does_not_declare_is_a_miss() -> None:
    named = policy(UNIT, ports=[{"port": "metrics"}])
    ((miss, text),) = misses(named)
    assert miss is Miss.PORT
    assert text == (
        "admits this source to TCP metrics (which the pod does not declare), not to TCP 80"
    )
    pod = ObservedPod(namespace="shop", name="web", named_ports=(("metrics", "TCP", 9090),))
    ((_, text),) = misses(named, pod=pod)
    assert "TCP metrics (9090), not to TCP 80" in text


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ({"namespaces": ["a", "b"]}, "the pod is in namespace shop, not in a, b"),
        (
            {"podSelector": {"matchLabels": {"app": "api"}}},
            "the pod has the label app=web, not app=api",
        ),
        (
            {"podSelector": {"matchLabels": {"tier": "a"}}},
            "the pod has no label tier, not tier=a",
        ),
        (
            {"podSelector": {"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}},
            "the pod has the label app=web, and app must be DoesNotExist",
        ),
        (
            {"podSelector": {"matchExpressions": [{"key": "tier", "operator": "Exists"}]}},
            "the pod has no such label, and tier must be Exists",
        ),
        (
            {"namespaceSelector": {"matchLabels": {"team": "x"}}},
            "namespace shop has no label team, not team=x",
        ),
        (
            {"namespaces": ["a"], "podSelector": {"matchLabels": {"app": "api"}}},
            "the pod is in namespace shop, not in a; the pod has the label app=web, not app=api",
        ),
    ],
)
def test_policy_for_other_pods_shows_what_differs(pods: dict[str, Any], why: str) -> None:
    assert misses(policy(UNIT, pods)) == [
        (Miss.POD, f"admits this source to TCP 80 of other pods: {why}")
    ]


def test_policy_for_other_nodes_shows_what_differs() -> None:
    selector = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b", "c"]}]}
    assert misses(policy(UNIT, nodeSelector=selector)) == [
        (
            Miss.NODE,
            "admits this source to TCP 80 on other nodes: this node has the label zone=a, and "
            "zone must be In (b, c)",
        )
    ]


@pytest.mark.parametrize(
    ("source", "cgroup", "why"),
    [
        (
            {"cgroup": {"path": SERVICE}},
            f"{SERVICE}/worker",
            f"the source is in {SERVICE}/worker, which 'match: subtree' includes",
        ),
        (
            {"cgroup": {"path": f"{SERVICE}/worker", "match": "subtree"}},
            SERVICE,
            f"the source is in {SERVICE}, above that",
        ),
        (
            {"systemdUnit": {"name": "sync@a.service"}},
            "/system.slice/system-sync.slice/sync@b.service",
            "the source is in unit sync@b.service",
        ),
        (
            {"systemdUnit": {"name": "backup.scope"}},
            SERVICE,
            "the source is in unit backup.service",
        ),
        (
            {"systemdUnit": {"name": "backup.scope"}},
            "/backup.slice/backup.service",
            "the source is in unit backup.service",
        ),
        (
            {"cgroup": {"path": "/"}},
            "/init.scope",
            "the source is in /init.scope, which 'match: subtree' includes",
        ),
        (
            {"cgroup": {"path": f"{SERVICE}/worker"}},
            SERVICE,
            f"the source is in {SERVICE}, above that",
        ),
    ],
)
def test_similar_source_is_named(source: dict[str, Any], cgroup: str, why: str) -> None:
    ((miss, text),) = misses(policy(source), cgroup=cgroup)
    assert miss is Miss.SOURCE
    assert text.endswith(f" to TCP 80, and {why}")


def test_host_network_pod_that_differs_in_one_thing_is_similar() -> None:
    selector: dict[str, Any] = {
        "namespaces": ["mon"],
        "podSelector": {"matchLabels": {"app": "scraper", "tier": "a"}},
    }
    source = {"hostNetworkPods": selector}
    ((miss, text),) = misses(policy(source), cgroup=IN_POD, source_pod=SCRAPER)
    assert miss is Miss.SOURCE
    assert text.endswith("and the source has the label tier=b, not tier=a")
    selector["namespaces"] = ["infra"]
    assert misses(policy(source), cgroup=IN_POD, source_pod=SCRAPER) == []


def test_source_in_the_root_cgroup_is_like_no_other() -> None:
    assert misses(policy({"cgroup": {"path": SERVICE}}), cgroup="/") == []


def test_pod_with_a_network_of_its_own_is_like_no_host_network_pod() -> None:
    source = {"hostNetworkPods": {"namespaces": ["infra"]}}
    ((miss, text),) = misses(policy(source), cgroup=IN_POD, source_pod=SCRAPER)
    assert miss is Miss.SOURCE
    assert text.endswith("and the source is in namespace mon, not in infra")
    own = msgspec.structs.replace(SCRAPER, host_network=False)
    assert misses(policy(source), cgroup=IN_POD, source_pod=own) == []


@pytest.mark.parametrize(
    ("protocol", "admitted"), [("UDP", "UDP"), (47, "47"), ("ICMP", "ICMP, ICMPv6")]
)
def test_protocol_without_ports_is_named_alone(protocol: str | int, admitted: str) -> None:
    assert misses(policy(UNIT, ports=[{"protocol": protocol}])) == [
        (Miss.PORT, f"admits this source to {admitted}, not to TCP 80")
    ]


@pytest.mark.parametrize(
    "source",
    [
        {"systemdUnit": {"name": "other.service"}},
        {"cgroup": {"path": "/system.slice/backup.service2"}},
        {"kernel": {}},
        {"hostNetworkPods": {"namespaces": ["mon"]}},
    ],
)
def test_unlike_source_is_no_near_miss(source: dict[str, Any]) -> None:
    assert misses(policy(source)) == []


def test_policy_that_misses_in_two_things_is_none() -> None:
    assert misses(policy(UNIT, {"namespaces": ["a"]}, [{"port": 81}])) == []


def test_policy_whose_rule_the_gate_lacks_is_the_first() -> None:
    found = misses(policy(UNIT, ports=[{"port": 81}]), policy(UNIT))
    assert [miss for miss, _ in found] == [Miss.NOTHING, Miss.PORT]
    assert found[0][1] == (
        "admits this, and the gate does not have its rule; 'podgate rules' shows why"
    )


def test_policy_with_action_audit_is_named_as_such() -> None:
    assert misses(policy(UNIT, action="Audit")) == [
        (Miss.ACTION, "would admit this, and its action is Audit: it only counts")
    ]
    assert misses(policy(UNIT, ports=[{"port": 81}], action="Audit")) == []


def test_each_source_of_a_policy_is_compared_by_itself() -> None:
    """One of two sources matches: the other is no miss."""
    sources: dict[str, Any] = {"from": [UNIT, {"systemdUnit": {"name": "other.service"}}]}
    both = policy(UNIT, ports=[{"port": 81}], **sources)
    assert [miss for miss, _ in misses(both)] == [Miss.PORT]

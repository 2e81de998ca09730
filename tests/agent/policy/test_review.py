"""Reviews of observed flows: what is admitted by now, and checks of policies by replay."""

import datetime
from typing import Any

import msgspec
import pytest

from agent.admin.observations import Observations, ObservedPod
from agent.admin.report import PolicyStatus, RuleStatus
from agent.policy import api_types
from agent.policy.api_types import Policy
from agent.policy.review import FlowFilter, Review
from tests.agent.policy.observing import IN_POD, OTHER, SINCE, WEB, flows, node

A, B = "/system.slice/a.service", "/system.slice/b.service"


def document(name: str, source: dict[str, Any], port: Any = 80, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": {
            "pods": {"namespaces": ["shop"], "podSelector": {"matchLabels": {"app": "web"}}},
            "from": [source],
            "ports": [{"port": port}],
            **spec,
        },
    }


def policy(*arguments: Any, **spec: Any) -> Policy:
    return api_types.read(document(*arguments, **spec), source="file")


def unit(name: str) -> dict[str, Any]:
    return {"systemdUnit": {"name": name}}


def review(*nodes: Observations, **chosen: Any) -> Review:
    return Review(nodes, FlowFilter(**chosen))


def suggested(made: Review) -> list[str]:
    return [one.flows[0].cgroup for one in made.suggestions() if not one.doubt]


def test_what_is_admitted_by_now_is_not_suggested_again() -> None:
    seen = node(flows(A), flows(B), policies=[document("a", unit("a.service"))])
    assert suggested(review(seen)) == [B]
    assert [one.cgroup for one in review(seen).admitted()] == [A]


def test_what_default_rules_admit_is_not_suggested() -> None:
    seen = node(flows(A), policies=[document("podgate:dns", unit("a.service"))])
    assert suggested(review(seen)) == []


def test_policies_of_a_node_count_for_its_own_flows_only() -> None:
    one = node(flows(A), policies=[document("a", unit("a.service"))])
    other = node(flows(A), name="node-2")
    assert suggested(review(one)) == []
    (left,) = review(one, other).suggestions()
    assert left.flows[0].nodes == ("node-2",)


@pytest.mark.parametrize(
    ("source", "cgroup", "is_admitted"),
    [
        ({"anyProcess": {}}, A, True),
        ({"kernel": {}}, A, False),
        ({"cgroup": {"path": A}}, A, True),
        ({"cgroup": {"path": "/system.slice"}}, A, False),
        ({"cgroup": {"path": "/system.slice", "match": "subtree"}}, A, True),
        ({"cgroup": {"path": "/system", "match": "subtree"}}, A, False),
        ({"cgroup": {"path": "/", "match": "subtree"}}, A, True),
        ({"cgroup": {"path": "/"}}, "/", True),
        (unit("a.service"), A, True),
        (unit("a.service"), f"{A}/below", True),
        (unit("system.slice"), A, True),
        (unit("a.service"), "/user.slice/user@1.service/a.service", False),
        (unit("a.service"), "/kubepods.slice/a.service", False),
    ],
)
def test_replay_of_each_kind_of_source(
    source: dict[str, Any], cgroup: str, is_admitted: bool
) -> None:
    seen = node(flows(cgroup))
    assert bool(review(seen).dropped([policy("p", source)])) is not is_admitted


def test_replay_of_selectors() -> None:
    labels = {"kubernetes.io/metadata.name": "shop", "team": "red"}
    pod = msgspec.structs.replace(WEB, namespace_labels=labels, named_ports=(("http", "TCP", 80),))
    ingress = ObservedPod(
        namespace="edge",
        name="i",
        labels={"app": "i"},
        host_network=True,
        namespace_labels={"a": "b"},
    )
    seen = node(flows(IN_POD, pod=pod, source_pod=ingress), node_labels={"disk": "ssd"})
    of_edge = {"hostNetworkPods": {"namespaceSelector": {"matchLabels": {"a": "b"}}}}
    red = {"pods": {"namespaceSelector": {"matchLabels": {"team": "red"}}}}
    blue = {"pods": {"namespaceSelector": {"matchLabels": {"team": "blue"}}}}
    ssd, hdd = ({"nodeSelector": {"matchLabels": {"disk": kind}}} for kind in ("ssd", "hdd"))
    assert not review(seen).dropped([policy("p", of_edge, **red, **ssd)])
    assert not review(seen).dropped([policy("p", of_edge, "http")])
    assert review(seen).dropped([policy("p", of_edge, "https")])
    assert review(seen).dropped([policy("p", of_edge, **blue)])
    assert review(seen).dropped([policy("p", of_edge, **hdd)])
    assert review(seen).dropped([policy("p", {"hostNetworkPods": {"namespaces": ["shop"]}})])


def test_rules_that_admit_no_flow_are_unused() -> None:
    seen = node(flows(A))
    policies = [policy("a", unit("a.service")), policy("b", unit("b.service"))]
    assert [one.policy for one in review(seen).unused(policies)] == ["b"]


def test_check_shows_what_only_staged_policies_would_admit() -> None:
    seen = review(node(flows(A), flows(B)))
    staged, allowing = (
        policy("a", unit("a.service"), action="Audit"),
        policy("b", unit("b.service")),
    )
    assert [one.flows[0].cgroup for one in seen.staged([staged, allowing])] == [A]
    assert seen.dropped([staged, allowing]) == []
    assert seen.staged([staged, policy("c", unit("a.service"))]) == []
    assert seen.unused([staged]) == []


def test_rule_with_hits_is_used() -> None:
    """What it admits is no dropped traffic any more."""
    rule = RuleStatus(source="unit b.service", protocol="TCP", ports="80", hits=1, problem="")
    in_force = PolicyStatus(name="b", source="API server", pods=[], rules=[rule])
    seen = node(rules=[in_force])
    assert not review(seen).unused([policy("b", unit("b.service"))])
    assert review(seen).unused([policy("b", unit("b.service"), 81)])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [A, B]),
        ({"namespaces": frozenset({"shop"})}, [A, B]),
        ({"namespaces": frozenset({"else"})}, []),
        ({"pod": "other"}, [B]),
        ({"min_count": 2}, [A, B]),
        ({"min_count": 3}, [B]),
        ({"since": SINCE + datetime.timedelta(hours=9)}, [A, B]),
        ({"since": SINCE + datetime.timedelta(hours=10)}, [A]),
    ],
)
def test_filters(chosen: dict[str, Any], expected: list[str]) -> None:
    seen = node(flows(A), flows(B, pod=OTHER, packets=5, last=9))
    assert sorted(suggested(review(seen, **chosen))) == expected


def test_each_flow_has_what_follows_from_it() -> None:
    seen = node(
        flows(A),
        flows(A, port=81),
        flows("/kubelet", port=9),
        flows("/", port=1),
        kubelet="/kubelet",
        policies=[document("a", unit("a.service"))],
    )
    found = [
        (one.is_admitted, one.is_listed, one.is_kubelet, bool(one.doubt))
        for one in review(seen).flows()
    ]
    assert found == [
        (True, True, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ]


def test_policy_of_another_version_is_left_out() -> None:
    newer = document("a", {"somethingNew": {}})
    known = document("b", unit("b.service"))
    assert suggested(review(node(flows(A), flows(B), policies=[newer, known]))) == [A]


def test_longest_time_counts_and_gaps_are_left_out() -> None:
    assert review().observed == datetime.timedelta()
    short = node(name="a", unobserved_seconds=20 * 3600.0)
    assert review(short).observed == datetime.timedelta(hours=4)
    assert review(short, node(name="b")).observed == datetime.timedelta(hours=24)


def test_source_with_too_many_ports_to_list_is_admitted_by_all_ports_alone() -> None:
    seen = node(flows(A, port=0, has_many_ports=True))
    of_all = document("p", unit("a.service"))
    del of_all["spec"]["ports"]
    assert not review(seen).dropped([api_types.read(of_all, source="file")])
    assert review(seen).dropped([policy("p", unit("a.service"), 80)])

"""Objects of this version, and of others."""

import copy
from typing import Any

import pytest

from agent.policy.cluster_network_policies import api_types
from agent.policy.cluster_network_policies.api_types import NotUnderstoodError
from tests.agent.policy.cluster_network_policies.objects import received

GOOD: dict[str, Any] = {
    "tier": "Admin",
    "priority": 0,
    "subject": {"namespaces": {"matchLabels": {"team": "a"}}},
    "ingress": [
        {
            "name": "web",
            "action": "Accept",
            "from": [{"pods": {"namespaceSelector": {}, "podSelector": {}}}],
            "protocols": [
                {"tcp": {"destinationPort": {"number": 80}}},
                {"udp": {"destinationPort": {"range": {"start": 1, "end": 2}}}},
                {"destinationNamedPort": "web"},
            ],
        }
    ],
}


def changed(*path: str | int, to: object) -> dict[str, Any]:
    made: Any = copy.deepcopy(GOOD)
    inner = made
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = to
    return dict(made)


def test_fields_of_the_version_are_read() -> None:
    policy = api_types.read(received("p", GOOD))
    assert policy.place == "tier Admin, priority 0"
    [rule] = policy.spec.ingress or ()
    assert [str(one) for one in rule.protocols or ()] == ["TCP 80", "UDP 1-2", "port web"]
    assert (rule.peers[0].is_everything, rule.is_of_everything) == (True, False)


ALL: dict[str, Any] = {}
WEB = {"matchLabels": {"app": "web"}}
WRONG = {"matchExpressions": [{"key": "a", "operator": "In"}]}


@pytest.mark.parametrize(
    ("peer", "is_everything"),
    [
        ({"namespaces": ALL}, True),
        ({"namespaces": WEB}, False),
        ({"pods": {"podSelector": ALL}}, True),
        ({"pods": {"podSelector": WEB}}, False),
        ({"pods": {"podSelector": ALL, "namespaceSelector": WEB}}, False),
    ],
)
def test_peer_of_all_pods_of_all_namespaces_is_everything(
    peer: dict[str, Any], is_everything: bool
) -> None:
    of_all = changed("ingress", 0, "protocols", to=None)
    of_all["ingress"][0]["from"] = [{"namespaces": WEB}, peer]
    found = api_types.read(received("p", of_all))
    [rule] = found.spec.ingress or ()
    assert rule.peers[1].is_everything is is_everything
    assert (found.deciding == rule) is is_everything


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ({"namespaces": ALL}, [True, True, True]),
        ({"namespaces": {"matchLabels": {"team": "a"}}}, [True, True, True]),
        ({"namespaces": {"matchLabels": {"team": "b"}}}, [False, False, False]),
        ({"pods": {"podSelector": WEB}}, [True, False, False]),
        ({"pods": {"podSelector": ALL}}, [True, True, True]),
        (
            {"pods": {"podSelector": ALL, "namespaceSelector": {"matchLabels": {"team": "b"}}}},
            [False, False, False],
        ),
    ],
)
def test_subject_has_pods_by_their_labels_and_those_of_their_namespace(
    subject: dict[str, Any], expected: list[bool]
) -> None:
    found = api_types.read(received("p", changed("subject", to=subject))).spec.subject
    pods: list[dict[str, str] | None] = [{"app": "web"}, {"app": "db"}, None]
    assert [found.has(labels, {"team": "a"}) for labels in pods] == expected


def test_protocols_without_a_port_are_named() -> None:
    spec = changed("ingress", 0, "protocols", to=[{"tcp": {}}, {"sctp": {}}])
    [rule] = api_types.read(received("p", spec)).spec.ingress or ()
    assert [str(one) for one in rule.protocols or ()] == ["TCP", "SCTP"]


@pytest.mark.parametrize(
    "spec",
    [
        changed("egress", to=[{"action": "Deny", "to": [{"moons": {}}]}]),
        changed("audit", to=True),
        changed("ingress", to=None),
    ],
)
def test_fields_that_decide_no_ingress_are_skipped(spec: dict[str, Any]) -> None:
    api_types.read(received("p", spec))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (changed("tier", to="Developer"), "tier"),
        (changed("priority", to=1001), "priority"),
        (changed("subject", to={}), "spec.subject: it has not exactly one"),
        (changed("subject", to={"namespaces": ALL, "pods": {"podSelector": ALL}}), "it has not"),
        (changed("subject", to={"namespaces": WRONG}), "spec.subject: selector.matchExpressions"),
        (changed("subject", to={"pods": {"podSelector": WRONG}}), "spec.subject: selector.match"),
        (
            changed("subject", to={"pods": {"podSelector": ALL, "namespaceSelector": WRONG}}),
            "spec.subject: selector.matchExpressions[0]: In needs values",
        ),
        (changed("subject", to={"nodes": {}}), "unknown field `nodes`"),
        (changed("subject", "namespaces", to={"matchCel": "x"}), "unknown field `matchCel`"),
        (changed("ingress", 0, "action", to="Log"), "'Log'"),
        (changed("ingress", 0, "from", 0, to={}), "spec.ingress[0].from[0]: it has not"),
        (changed("ingress", 0, "from", 0, to={"nodes": {}}), "unknown field `nodes`"),
        (changed("ingress", 0, "from", to=[]), "length >= 1"),
        (changed("ingress", 0, "unless", to=[]), "unknown field `unless`"),
        (changed("ingress", 0, "protocols", 0, to={}), "protocols[0]: it has not exactly one"),
        (changed("ingress", 0, "protocols", 0, to={"quic": {}}), "unknown field `quic`"),
    ],
)
def test_what_may_match_otherwise_is_not_understood(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(NotUnderstoodError) as caught:
        api_types.read(received("p", spec))
    assert problem in str(caught.value)

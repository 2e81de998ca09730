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

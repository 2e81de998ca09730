"""ClusterNetworkPolicies decide before and after NetworkPolicies, each case by its name."""

from typing import Any

import pytest

from agent.network_policy.checks import Checks, Flow, plan
from agent.network_policy.objects import NetworkPolicy, Protocol
from agent.network_policy.policy_set import PolicySet
from agent.network_policy.verdicts import Verdict
from agent.policy.cluster_network_policies import api_types, evaluation
from agent.policy.cluster_network_policies.api_types import ClusterNetworkPolicy
from tests.agent.network_policy.test_checks import POD, WITNESS, ingress
from tests.agent.policy.cluster_network_policies.objects import received

ANY: dict[str, Any] = {"namespaces": {}}
INFRA: dict[str, Any] = {"namespaces": {"matchLabels": {"team": "infra"}}}
OTHER: dict[str, Any] = {"namespaces": {"matchLabels": {"team": "other"}}}
HTTP = {"destinationNamedPort": "http"}
TCP: dict[str, Any] = {"tcp": {}}
TCP_RANGE = {"tcp": {"destinationPort": {"range": {"start": 8000, "end": 8079}}}}


def rule(action: str, peer: dict[str, Any] = ANY, **fields: Any) -> dict[str, Any]:
    return {"action": action, "from": [peer], **fields}


def number(port: int) -> dict[str, Any]:
    return {"tcp": {"destinationPort": {"number": port}}}


def cluster_policy(
    *rules: dict[str, Any], tier: str = "Admin", priority: int = 1, name: str = "p", **spec: Any
) -> ClusterNetworkPolicy:
    fields = {"tier": tier, "priority": priority, "subject": ANY, "ingress": list(rules), **spec}
    return api_types.read(received(name, fields))


def verdict(
    port: int,
    *policies: ClusterNetworkPolicy,
    network: tuple[NetworkPolicy, ...] = (),
    protocol: Protocol = "TCP",
) -> Verdict:
    selected = PolicySet(network, evaluation.ordered(policies)).select(POD, "Ingress")
    return selected.decide(WITNESS, POD, protocol, port)


ADMIT_HTTP = (ingress({"ports": [{"port": "http"}]}),)
DENY = cluster_policy(rule("Deny"))
BASELINE_DENY = cluster_policy(rule("Deny"), tier="Baseline")
ADMITTED, DROPPED, UNDEFINED = Verdict.ADMITTED, Verdict.DROPPED, Verdict.UNDEFINED


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        pytest.param([], ADMITTED, id="none admits"),
        pytest.param([DENY], DROPPED, id="Deny of all"),
        pytest.param([cluster_policy(rule("Deny", OTHER))], ADMITTED, id="Deny of others"),
        pytest.param([cluster_policy(rule("Deny", INFRA))], DROPPED, id="Deny of the namespace"),
        pytest.param(
            [cluster_policy(rule("Accept"), rule("Deny"))], ADMITTED, id="the first rule decides"
        ),
        pytest.param(
            [DENY, cluster_policy(rule("Accept"), priority=0, name="first")],
            ADMITTED,
            id="the lower priority value decides",
        ),
        pytest.param(
            [DENY, cluster_policy(rule("Accept"), name="same")],
            UNDEFINED,
            id="one priority, two actions: either",
        ),
        pytest.param(
            [cluster_policy(rule("Pass")), BASELINE_DENY], DROPPED, id="Pass leaves it to Baseline"
        ),
        pytest.param(
            [cluster_policy(rule("Pass"), rule("Deny"))], ADMITTED, id="Pass ends the tier"
        ),
        pytest.param([BASELINE_DENY], DROPPED, id="Baseline without NetworkPolicies"),
        pytest.param([cluster_policy(rule("Deny"), subject=OTHER)], ADMITTED, id="other subjects"),
        pytest.param(
            [cluster_policy(rule("Deny", protocols=[HTTP]))], DROPPED, id="a named port of the pod"
        ),
        pytest.param(
            [cluster_policy(rule("Deny", protocols=[{"udp": {}}]))], ADMITTED, id="other protocol"
        ),
        pytest.param(
            [cluster_policy(rule("Deny", protocols=[TCP_RANGE]))], ADMITTED, id="out of the range"
        ),
        pytest.param([cluster_policy(rule("Deny", protocols=[TCP]))], DROPPED, id="all TCP"),
        pytest.param([cluster_policy(rule("Deny", protocols=[number(8080)]))], DROPPED, id="port"),
        pytest.param(
            [cluster_policy(rule("Deny", protocols=[number(8081)]))], ADMITTED, id="other port"
        ),
        pytest.param(
            [cluster_policy(rule("Deny", protocols=[{"sctp": {}}, number(8080)]))],
            DROPPED,
            id="any of several protocols",
        ),
        pytest.param(
            [cluster_policy(rule("Deny", OTHER), rule("Accept")), BASELINE_DENY],
            ADMITTED,
            id="a rule of others decides nothing",
        ),
        pytest.param(
            [DENY, cluster_policy(rule("Deny"), name="same")],
            DROPPED,
            id="one priority, one action",
        ),
        pytest.param(
            [cluster_policy(rule("Deny", OTHER)), cluster_policy(rule("Deny"), priority=2)],
            DROPPED,
            id="the next priority, where the first has no rule",
        ),
    ],
)
def test_tiers_by_rule(policies: list[ClusterNetworkPolicy], expected: Verdict) -> None:
    assert verdict(8080, *policies) is expected


def test_network_policies_are_between_the_tiers() -> None:
    assert verdict(8080, BASELINE_DENY, network=ADMIT_HTTP) is ADMITTED
    assert verdict(9090, BASELINE_DENY, network=ADMIT_HTTP) is DROPPED
    assert verdict(8080, DENY, network=ADMIT_HTTP) is DROPPED
    assert verdict(9090, cluster_policy(rule("Accept")), network=ADMIT_HTTP) is ADMITTED


def test_range_is_inclusive() -> None:
    policy = cluster_policy(rule("Deny", protocols=[TCP_RANGE]))
    found = {port: verdict(port, policy) for port in (7999, 8000, 8079, 8080)}
    assert found == {7999: ADMITTED, 8000: DROPPED, 8079: DROPPED, 8080: ADMITTED}


def test_protocol_without_a_port_is_all_of_its_ports() -> None:
    protocols: tuple[Protocol, ...] = ("TCP", "UDP", "SCTP")
    for protocol in protocols:
        policy = cluster_policy(rule("Deny", protocols=[{protocol.lower(): {}}]))
        found = [verdict(port, policy, protocol=protocol) for port in (1, 8080, 65535)]
        assert found == [DROPPED] * 3


def test_flows_are_chosen_at_the_edges_of_rules() -> None:
    policy = cluster_policy(rule("Deny", protocols=[TCP_RANGE]))
    names = ("ClusterNetworkPolicy p",)
    assert plan(PolicySet((), (policy,)), POD, WITNESS) == (
        Checks("Ingress", names, dropped=Flow("TCP", 8079), admitted=Flow("TCP", 65535)),
    )
    one = cluster_policy(rule("Accept", protocols=[number(7)]), rule("Deny"))
    assert plan(PolicySet((), (one,)), POD, WITNESS) == (
        Checks("Ingress", names, dropped=Flow("TCP", 65535), admitted=Flow("TCP", 7)),
    )


def test_nothing_is_tried_where_rules_for_egress_might_decide() -> None:
    """They are not read; a policy of the witness could drop what the pod's admit."""
    policy = cluster_policy(egress=[{"action": "Deny", "to": [{"networks": ["0.0.0.0/0"]}]}])
    found = plan(PolicySet(ADMIT_HTTP, (policy,)), POD, WITNESS)
    assert [(one.direction, one.dropped, one.admitted) for one in found] == [
        ("Ingress", None, None),
        ("Egress", None, None),
    ]

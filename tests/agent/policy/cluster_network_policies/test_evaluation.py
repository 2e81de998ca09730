"""What tiers, priorities and actions mean for node traffic: the conformance suite's cases."""

from typing import Any

import pytest

from agent.policy.cluster_network_policies import api_types, evaluation
from agent.policy.cluster_network_policies.api_types import ClusterNetworkPolicy
from tests.agent.policy.cluster_network_policies.objects import received
from tests.cnp import cases
from tests.cnp.cases import Case

EVERYTHING: dict[str, dict[str, str]] = {"namespaces": {}}
OF_SHOP = {"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}


def policy(
    name: str, action: str, *, tier: str = "Admin", priority: int = 10, **changes: Any
) -> ClusterNetworkPolicy:
    spec = {
        "tier": tier,
        "priority": priority,
        "subject": {"namespaces": {}},
        "ingress": [{"action": action, "from": [EVERYTHING]}],
        **changes,
    }
    return api_types.read(received(name, spec))


@pytest.mark.parametrize("case", cases.read(), ids=lambda case: case.name)
def test_decision_of_each_case(case: Case) -> None:
    policies = [
        api_types.read(received(one["metadata"]["name"], one["spec"]))
        for one in case.cluster_network_policies()
    ]
    is_isolated = any("Ingress" in one["policyTypes"] for one in case.network_policies)
    found = evaluation.evaluate(
        evaluation.ordered(policies), case.labels, {}, is_isolated=is_isolated
    )
    assert found.ingress == case.ingress
    assert (case.host_process == cases.DROPPED) is found.is_denied
    others = evaluation.evaluate(evaluation.ordered(policies), {}, {}, is_isolated=False)
    assert others == evaluation.Decision()


def test_suite_has_each_tier_with_each_action() -> None:
    have = {
        (spec["tier"], rule["action"])
        for case in cases.read()
        for spec in case.policies
        for rule in spec.get("ingress", ())
    }
    assert have == {
        (tier, action) for tier in ("Admin", "Baseline") for action in ("Accept", "Deny", "Pass")
    }
    assert all(case.kubelet == cases.ADMITTED for case in cases.read())


def test_baseline_closes_nothing_while_network_policies_are_unknown() -> None:
    policies = [policy("all", "Deny", tier="Baseline")]
    found = evaluation.evaluate(policies, {}, {}, is_isolated=None)
    assert (found.ingress, found.is_denied) == (evaluation.Ingress.UNKNOWN, False)
    assert "NetworkPolicies cannot be read" in evaluation.sentence(found, closes=True)


def test_unknown_labels_of_a_pod_match_only_selectors_of_all_pods() -> None:
    by_label = received(
        "some",
        {
            "tier": "Admin",
            "priority": 1,
            "subject": {"pods": {"podSelector": {"matchLabels": {"app": "web"}}}},
            "ingress": [{"action": "Deny", "from": [EVERYTHING]}],
        },
    )
    policies = [api_types.read(by_label)]
    assert not evaluation.evaluate(policies, None, {}, is_isolated=False).is_denied
    assert evaluation.evaluate(policies, {"app": "web"}, {}, is_isolated=False).is_denied
    everywhere = [policy("all", "Deny")]
    assert evaluation.evaluate(everywhere, None, {}, is_isolated=False).is_denied


def test_equal_priorities_with_different_actions_are_named() -> None:
    policies = evaluation.ordered([policy("b", "Accept"), policy("a", "Deny")])
    found = evaluation.evaluate(policies, {}, {}, is_isolated=False)
    assert (found.is_denied, found.ambiguous) == (True, ("b",))
    assert "another action: b;" in evaluation.sentence(found, closes=False)


def test_sentence_names_whether_the_host_side_is_closed() -> None:
    found = evaluation.evaluate([policy("all", "Deny")], {}, {}, is_isolated=False)
    start = "ClusterNetworkPolicy all (tier Admin, priority 10) denies all ingress; podgate "
    assert evaluation.sentence(found, closes=True).startswith(start + "drops host processes")
    assert evaluation.sentence(found, closes=False).startswith(start + "only observes it")


@pytest.mark.parametrize(
    ("one", "meaning"),
    [
        (policy("p", "Deny", ingress=[]), "has no rules for ingress, so none for node traffic"),
        (
            policy("p", "Deny", ingress=[{"action": "Deny", "from": [OF_SHOP]}]),
            "matches some pods or ports, so it decides nothing for the node",
        ),
        (
            policy("p", "Deny"),
            "denies all ingress; the API leaves open whether that includes the node",
        ),
        (policy("p", "Accept"), "accepts all ingress, so nothing after it denies the node"),
        (
            policy("p", "Pass"),
            "passes all ingress on, so the rest of tier Admin decides nothing",
        ),
    ],
)
def test_meaning_of_a_policy(one: ClusterNetworkPolicy, meaning: str) -> None:
    assert evaluation.meaning(one) == meaning


@pytest.mark.parametrize(
    ("policies", "is_isolated", "ingress", "text"),
    [
        ([], False, "undecided", "No ClusterNetworkPolicy decides for node traffic."),
        (
            [policy("p", "Accept")],
            True,
            "accepted",
            "ClusterNetworkPolicy p (tier Admin, priority 10) accepts all ingress; node traffic is "
            "as the mode has it.",
        ),
        (
            [policy("p", "Accept", tier="Baseline")],
            False,
            "accepted",
            "ClusterNetworkPolicy p (tier Baseline, priority 10) accepts all ingress; node traffic "
            "is as the mode has it.",
        ),
        (
            [policy("p", "Deny", tier="Baseline")],
            True,
            "by-network-policy",
            "ClusterNetworkPolicy p (tier Baseline, priority 10) is not reached, since a "
            "NetworkPolicy selects the pod, and those never deny its own node.",
        ),
    ],
)
def test_decision_in_words(
    policies: list[ClusterNetworkPolicy], is_isolated: bool, ingress: str, text: str
) -> None:
    found = evaluation.evaluate(policies, {}, {}, is_isolated=is_isolated)
    assert (found.ingress, found.ambiguous) == (ingress, ())
    assert evaluation.sentence(found, closes=True) == text


def test_policies_are_evaluated_by_tier_priority_and_name() -> None:
    given = [
        policy("d", "Deny", tier="Baseline", priority=0),
        policy("c", "Deny", priority=11),
        policy("b", "Deny"),
        policy("a", "Deny"),
    ]
    assert [one.name for one in evaluation.ordered(given)] == ["a", "b", "c", "d"]


def test_same_action_or_another_priority_is_not_ambiguous() -> None:
    policies = [policy("a", "Deny"), policy("b", "Deny"), policy("c", "Accept", priority=11)]
    found = evaluation.evaluate(policies, {}, {}, is_isolated=False)
    assert found == evaluation.Decision(
        evaluation.Ingress.DENIED, policies[0], tuple(policies), ambiguous=()
    )


def test_tier_that_is_passed_on_is_followed_by_the_next() -> None:
    policies = [
        policy("a", "Pass"),
        policy("b", "Accept", priority=11),
        policy("c", "Deny", tier="Baseline"),
    ]
    found = evaluation.evaluate(policies, {}, {}, is_isolated=False)
    assert (found.ingress, found.by) == (evaluation.Ingress.DENIED, policies[2])
    found = evaluation.evaluate(policies[:2], {}, {}, is_isolated=False)
    assert found == evaluation.Decision(selecting=tuple(policies[:2]))

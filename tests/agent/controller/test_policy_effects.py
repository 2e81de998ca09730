"""Whether a policy has an effect on any node, once all of its nodes have reported it."""

import pytest

from agent.controller import policy_effects
from agent.controller.policy_effects import NO_POD, NO_SOURCE
from agent.controller.policy_revisions import PolicyRevisions
from agent.kube.node_report import NodePolicies
from tests.agent.controller.test_policy_revisions import policy

RULES = ("tcp 80", "tcp 81")


@pytest.fixture
def revisions() -> PolicyRevisions:
    made = PolicyRevisions()
    # Nodes report by name: the one that is tested is the second of three.
    made.update([policy("c"), policy("b"), policy("a")])
    return made


def problem(revisions: PolicyRevisions, *effects: str) -> tuple[str, str] | None:
    """Of "b" on as many nodes: what each reports of all policies."""
    reports = {
        f"n{number}": NodePolicies(revisions.current, 3, effects=text)
        for number, text in enumerate(effects)
    }
    return policy_effects.problem("b", RULES, reports.keys(), reports, revisions)


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        (["0,22,0"], ("", "")),
        # Each rule on another node.
        (["0,21,0", "0,12,0"], ("", "")),
        (["0,00,0", "0,22,0"], ("", "")),
        (["2,00,2", "2,00,2"], (NO_POD, "it selects no pod of these")),
        (["0,20,0"], (NO_SOURCE, "no node has the source or port of: tcp 81")),
        (["0,12,0", "0,02,0"], (NO_SOURCE, "no node has the source or port of: tcp 80")),
        (["0,01,0"], (NO_SOURCE, "no node has the source or port of: tcp 80, tcp 81")),
    ],
)
def test_best_effect_of_each_rule_on_any_node_counts(
    revisions: PolicyRevisions, effects: list[str], expected: tuple[str, str]
) -> None:
    assert problem(revisions, *effects) == expected


@pytest.mark.parametrize(
    "unknown", ["", "0,2,0", "0,222,0", "0,2x,0", "0,23,0", "0,22", "0,22,0,0", "0,,0"]
)
def test_effects_are_unclear_before_all_nodes_report_readable_ones(
    revisions: PolicyRevisions, unknown: str
) -> None:
    assert problem(revisions, unknown) is None
    assert problem(revisions, "0,00,0", unknown) is None
    assert problem(revisions) is None


def test_rules_may_have_all_effects_at_once(revisions: PolicyRevisions) -> None:
    reports = {"n0": NodePolicies(revisions.current, 3, effects="0,012,0")}
    found = policy_effects.problem("b", (*RULES, "tcp 82"), ["n0"], reports, revisions)
    assert found == (NO_SOURCE, "no node has the source or port of: tcp 80, tcp 81")


def test_report_of_other_policies_or_of_none_is_waited_for(revisions: PolicyRevisions) -> None:
    current = NodePolicies(revisions.current, 3, effects="0,22,0")
    old = NodePolicies("0123456789abcdef", 3, effects="0,22,0")
    for reports in ({"n0": current}, {"n0": current, "n1": old}):
        found = policy_effects.problem("b", RULES, ["n0", "n1"], reports, revisions)
        assert found is None
    others = {"n0": current, "elsewhere": old}
    assert policy_effects.problem("b", RULES, ["n0"], others, revisions) == ("", "")

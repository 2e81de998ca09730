"""The status of one policy: its sentences, which of them comes first, and what stays as it was."""

import datetime
from typing import Any

import msgspec
import pytest

from agent.controller import policy_status
from agent.controller.policy_effects import NO_POD
from agent.controller.policy_revisions import PolicyRevisions
from agent.controller.policy_status import Condition, NodeCounts, PolicyStatus, ValidatedPolicy
from agent.kube.node_report import FailedPolicy, NodePolicies
from agent.kube.objects import ObjectMetadata
from agent.policy.api_source import ApiPolicy
from agent.policy.selectors import LabelSelector

AT = datetime.datetime(2026, 12, 1, 10, 0, tzinfo=datetime.UTC)
NOW = "2026-12-01T10:00:00Z"
VALID = ValidatedPolicy()


def policy(**spec: Any) -> ApiPolicy:
    metadata = ObjectMetadata(name="a", uid="uid-a", generation=3)
    return ApiPolicy(metadata=metadata, spec=msgspec.Raw(msgspec.json.encode(spec)))


class Nodes:
    """What nodes report of the policy "a": the newest set, unless given."""

    def __init__(self) -> None:
        self.reports: dict[str, NodePolicies] = {}
        self._revisions = PolicyRevisions()
        self._revisions.update([policy().metadata])

    def report(self, *names: str, failed: str = "", generation: int = 3, effects: str = "") -> None:
        problems = (FailedPolicy("a", generation, failed),) if failed else ()
        for name in names:
            self.reports[name] = NodePolicies(self._revisions.current, 1, problems, effects)

    def status(
        self,
        *names: str,
        found: ValidatedPolicy = VALID,
        missing: tuple[str, ...] = (),
        before: PolicyStatus | None = None,
    ) -> PolicyStatus:
        """names: of selected nodes."""
        return policy_status.evaluate(
            policy(), found, missing, names, self.reports, self._revisions, now=AT, before=before
        )


def conditions(status: PolicyStatus) -> list[tuple[str, str, str]]:
    return [(one.status, one.reason, one.message) for one in status.conditions]


ACCEPTED = ("True", "Valid", "The spec is valid.")


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_status_of_a_policy_in_force(nodes: Nodes) -> None:
    nodes.report("one", "two", "unselected")
    accepted, in_force = (
        Condition(
            type=kind,
            status="True",
            observed_generation=3,
            last_transition_time=NOW,
            reason=reason,
            message=message,
        )
        for kind, reason, message in (
            ("Accepted", "Valid", "The spec is valid."),
            ("Programmed", "Programmed", "In force on all 2 selected nodes."),
        )
    )
    status = nodes.status("one", "two")
    assert status == PolicyStatus(3, (accepted, in_force), NodeCounts(2, 2, 0))
    assert policy_status.read_status(msgspec.Raw(msgspec.json.encode(status))) == status


def test_nodes_that_are_waited_for_are_named_in_order_and_not_all(nodes: Nodes) -> None:
    nodes.report("e")
    status = nodes.status("e", "d", "c", "b", "a")
    text = "In force on 1 of 5 selected nodes; waiting for a, b, c and 1 more."
    assert conditions(status) == [ACCEPTED, ("False", "Pending", text)]
    assert status.nodes == NodeCounts(5, 1, 0)


def test_first_node_that_has_a_problem_of_this_generation_is_named(nodes: Nodes) -> None:
    nodes.report("d")
    nodes.report("c", failed="No room.", generation=2)
    nodes.report("b", failed="No table.")
    nodes.report("a", failed="No memory.")
    nodes.report("unselected", failed="No kernel.")
    status = nodes.status("d", "c", "b", "a", "missing")
    text = "In force on 2 of 5 selected nodes. a: No memory."
    assert conditions(status) == [ACCEPTED, ("False", "Failed", text)]
    assert status.nodes == NodeCounts(5, 2, 2)


def test_policy_for_no_node_is_not_programmed(nodes: Nodes) -> None:
    nodes.report("one")
    text = "No node has the labels of nodeSelector."
    status = nodes.status()
    assert conditions(status) == [ACCEPTED, ("False", "NoNodeSelected", text)]
    assert status.nodes == NodeCounts()


def test_invalid_policy_has_no_numbers_of_nodes(nodes: Nodes) -> None:
    nodes.report("one", failed="No room.")
    status = nodes.status("one", found=ValidatedPolicy("spec.pods: missing"), missing=("shop",))
    assert conditions(status) == [
        ("False", "Invalid", "spec.pods: missing."),
        ("False", "NotAccepted", "The last valid version stays in force."),
    ]
    assert status.nodes == NodeCounts()


@pytest.mark.parametrize(
    ("seconds", "reason"), [(-1, "Expired"), (0, "Expired"), (1, "NoPodSelected")]
)
def test_end_of_a_policy_comes_before_its_effect(nodes: Nodes, seconds: int, reason: str) -> None:
    nodes.report("one", effects="0")
    end = AT + datetime.timedelta(seconds=seconds)
    found = ValidatedPolicy(rules=("the kernel, any any",), expires=end)
    accepted, in_force = conditions(nodes.status("one", found=found, missing=("shop",)))
    text = "The spec is valid; namespace shop does not exist."
    assert accepted == ("True", "NamespaceMissing", text)
    assert in_force[:2] == ("False", reason)


@pytest.mark.parametrize("has_report", [False, True])
def test_staged_policy_is_staged_whatever_nodes_report(nodes: Nodes, *, has_report: bool) -> None:
    if has_report:
        nodes.report("one", effects="0")
    found = ValidatedPolicy(rules=("the kernel, any any",), is_staged=True, staged_text="Audit.")
    status = nodes.status("one", found=found)
    assert conditions(status) == [ACCEPTED, ("False", "Staged", "Audit.")]
    assert status.nodes == NodeCounts(1, int(has_report), 0)


def test_missing_namespaces_are_named_and_not_all(nodes: Nodes) -> None:
    nodes.report("one")
    accepted, _ = conditions(nodes.status("one", missing=("a", "b", "c", "d")))
    text = "The spec is valid; namespaces a, b, c and 1 more do not exist."
    assert accepted == ("True", "NamespaceMissing", text)


def test_message_has_a_length_that_the_api_accepts(nodes: Nodes) -> None:
    nodes.report("one", failed="x" * 5000)
    _, in_force = conditions(nodes.status("one"))
    assert len(in_force[2]) == 2048
    nodes.report("one", effects="1")
    found = ValidatedPolicy(rules=("x" * 5000,))
    texts = [text for _, _, text in conditions(nodes.status("one", found=found))]
    assert [len(text) for text in texts] == [2048, 2048]
    accepted, _ = conditions(nodes.status("one", missing=("x" * 5000,)))
    assert len(accepted[2]) == 2048


RULED = ValidatedPolicy(rules=("the kernel, any any",))


def test_effect_of_before_stays_while_nodes_do_not_report_it(nodes: Nodes) -> None:
    nodes.report("one", effects="0")
    known = nodes.status("one", found=RULED)
    text = "In force on all 1 selected nodes; it selects no pod of these."
    expected = [
        ("True", NO_POD, "The spec is valid; it selects no pod of these."),
        ("False", NO_POD, text),
    ]
    assert conditions(known) == expected
    nodes.report("one")
    assert conditions(nodes.status("one", found=RULED, before=known)) == expected
    # It was another spec's, or is no effect, or there is none.
    older = msgspec.structs.replace(
        known,
        conditions=tuple(
            msgspec.structs.replace(one, observed_generation=2) for one in known.conditions
        ),
    )
    pending = Nodes().status("one", found=RULED)
    for before in (older, pending, PolicyStatus(3), None):
        found = conditions(nodes.status("one", found=RULED, before=before))
        assert found == [ACCEPTED, ("True", "Programmed", "In force on all 1 selected nodes.")]


def test_time_of_a_condition_stays_while_its_status_does(nodes: Nodes) -> None:
    nodes.report("one")
    before = msgspec.structs.replace(
        nodes.status("one"),
        conditions=(
            Condition(type="Programmed", status="False", last_transition_time="x", reason="x"),
            Condition(type="Accepted", status="True", last_transition_time="earlier", reason="x"),
        ),
    )
    accepted, in_force = nodes.status("one", before=before).conditions
    assert (accepted.last_transition_time, in_force.last_transition_time) == ("earlier", NOW)


@pytest.mark.parametrize("raw", [b"null", b"1", b'{"conditions": 1}', b"[]"])
def test_status_of_another_program_is_none(raw: bytes) -> None:
    assert policy_status.read_status(msgspec.Raw(raw)) is None


def test_nodes_are_selected_by_their_labels() -> None:
    nodes = {"a": {"pool": "edge"}, "b": {}, "c": {"pool": "edge", "zone": "1"}}
    assert policy_status.selected(nodes, None) == ["a", "b", "c"]
    assert policy_status.selected(nodes, LabelSelector({"pool": "edge"})) == ["a", "c"]


def test_policy_is_read_with_its_rules_in_words_and_all_namespaces_that_it_names() -> None:
    source = {"hostNetworkPods": {"namespaces": ["infra", "shop"]}}
    spec = {
        "pods": {"namespaces": ["shop", "web"]},
        "from": [{"kernel": {}}, source],
        "ports": [{"port": 80, "endPort": 90}],
        "nodeSelector": {"matchLabels": {"pool": "edge"}},
        "expires": "2026-12-01T11:00:00+01:00",
    }
    text = "Its action is Audit: nodes count what it would admit, and it admits nothing."
    assert policy_status.validated(policy(**spec)) == ValidatedPolicy(
        nodes=LabelSelector({"pool": "edge"}),
        rules=(
            "the kernel, TCP 80-90",
            'hostNetwork pods {"namespaces":["infra","shop"]}, TCP 80-90',
        ),
        namespaces=frozenset({"infra", "shop", "web"}),
        expires=AT,
        staged_text=text,
    )
    plain = {"pods": {"podSelector": {}}, "from": [{"anyProcess": {}}]}
    assert policy_status.validated(policy(**plain, action="Audit")) == ValidatedPolicy(
        rules=("any process, any any",), is_staged=True, staged_text=text
    )


def test_egress_policy_is_read_with_all_namespaces_that_it_names() -> None:
    spec = {
        "subjects": [
            {"hostNetworkPods": {"namespaces": ["shop", "web"]}},
            {"systemdUnit": {"name": "backup.service"}},
        ],
        "except": [{"hostNetworkPods": {"namespaces": ["infra"]}}],
        "deny": [{"preset": "Metadata"}],
        "nodeSelector": {"matchLabels": {"pool": "edge"}},
        "action": "Enforce",
    }
    text = "Its action is Audit: nodes count what it would deny, and it denies nothing."
    expected = ValidatedPolicy(
        nodes=LabelSelector({"pool": "edge"}),
        namespaces=frozenset({"infra", "shop", "web"}),
        staged_text=text,
    )
    assert policy_status.validated_egress(policy(**spec)) == expected
    staged = policy_status.validated_egress(policy(**spec | {"action": "Audit"}))
    assert staged.is_staged


@pytest.mark.parametrize(
    "validated",
    [lambda: policy_status.validated, lambda: policy_status.validated_egress],
    ids=["access", "egress"],
)
def test_policy_that_agents_cannot_read_is_its_problem_alone(validated: Any) -> None:
    found = validated()(policy(**{"x" * 3000: 1}))
    assert found.problem.startswith("spec: object ")
    assert len(found.problem) <= 2048
    assert found == ValidatedPolicy(found.problem)

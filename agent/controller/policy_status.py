"""Status of HostAccessPolicies: whether each is valid, and on how many nodes it is in force."""

import dataclasses
import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import msgspec

from agent import labels
from agent.controller import policy_effects
from agent.controller.policy_revisions import PolicyRevisions
from agent.kube import responses
from agent.kube.node_report import FailedPolicy, NodePolicies
from agent.listing import listed
from agent.policy import api_types, egress_types
from agent.policy.api_source import ApiPolicy, document_of
from agent.policy.kinds import PolicyError
from agent.policy.selectors import LabelSelector

ACCEPTED: Final = "Accepted"
PROGRAMMED: Final = "Programmed"
NO_NAMESPACE: Final = "NamespaceMissing"
EXPIRED: Final = "Expired"
STAGED: Final = "Staged"

# Names in one sentence; kubectl shows it in one line.
_MAX_NAMES: Final = 3
_MAX_MESSAGE: Final = 2048

Status = Literal["True", "False", "Unknown"]


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """metav1.Condition; the time is RFC 3339 in whole seconds."""

    type: str
    status: str
    observed_generation: int = 0
    last_transition_time: str = ""
    reason: str
    message: str = ""


class NodeCounts(msgspec.Struct, frozen=True):
    """Numbers of nodes."""

    selected: int = 0
    programmed: int = 0
    failed: int = 0


class PolicyStatus(msgspec.Struct, frozen=True, rename="camel"):
    """`status` of a HostAccessPolicy."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    nodes: NodeCounts = NodeCounts()

    def condition(self, kind: str) -> Condition | None:
        return next((found for found in self.conditions if found.type == kind), None)


@dataclasses.dataclass(frozen=True, slots=True)
class ValidatedPolicy:
    """A policy as the agents read it. problem: why they cannot; nodes: None for all; rules: in
    words, in the agents' order; namespaces: those that it names; expires: when it ends; is_staged:
    whether it only counts, which staged_text explains."""

    problem: str = ""
    nodes: LabelSelector | None = None
    rules: tuple[str, ...] = ()
    namespaces: frozenset[str] = frozenset()
    expires: datetime.datetime | None = None
    is_staged: bool = False
    staged_text: str = ""


def validated(policy: ApiPolicy) -> ValidatedPolicy:
    """Read a policy with the agents' own code."""
    try:
        found = api_types.read(document_of(policy), source="API server")
    except (PolicyError, msgspec.DecodeError) as error:
        return ValidatedPolicy(str(error)[:_MAX_MESSAGE])
    rules = tuple(f"{one.source}, {one.protocol_text} {one.ports_text}" for one in found.rules)
    selectors = (found.pods, *found.host_pods.values())
    names = (name for selector in selectors for name in selector.namespaces or ())
    return ValidatedPolicy(
        nodes=found.nodes,
        rules=rules,
        namespaces=frozenset(names),
        expires=found.document.spec.expires,
        is_staged=found.is_staged,
        staged_text="Its action is Audit: nodes count what it would admit, and it admits nothing.",
    )


def validated_egress(policy: ApiPolicy) -> ValidatedPolicy:
    """The same of a HostEgressPolicy."""
    try:
        found = egress_types.read(document_of(policy, labels.EGRESS_KIND), "API server")
    except (PolicyError, msgspec.DecodeError) as error:
        return ValidatedPolicy(str(error)[:_MAX_MESSAGE])
    names = (name for selector in found.pods.values() for name in selector.namespaces or ())
    return ValidatedPolicy(
        nodes=found.nodes,
        namespaces=frozenset(names),
        is_staged=not found.is_enforced,
        staged_text="Its action is Audit: nodes count what it would deny, and it denies nothing.",
    )


def selected(nodes: Mapping[str, Mapping[str, str]], selector: LabelSelector | None) -> list[str]:
    """Names of the nodes that a policy is for. nodes: labels by name."""
    return [name for name, labels in nodes.items() if selector is None or selector.matches(labels)]


def evaluate(
    policy: ApiPolicy,
    found: ValidatedPolicy,
    missing: Sequence[str],
    names: Collection[str],
    reports: Mapping[str, NodePolicies],
    revisions: PolicyRevisions,
    *,
    now: datetime.datetime,
    before: PolicyStatus | None,
) -> PolicyStatus:
    """The status that a policy should have. missing: of its namespaces, those that do not exist;
    names: of selected nodes; reports: by node.

    now: for conditions that change, and for the policy's end; before: the status that it has.
    """
    name, generation = policy.metadata.name, policy.metadata.generation
    if found.problem:
        counts = NodeCounts()
        accepted = "False", "Invalid", f"{found.problem}."
        in_force = "False", "NotAccepted", "The last valid version stays in force."
    else:
        failed = _failed(name, generation, names, reports)
        newest = {
            revision
            for revision in {report.revision for report in reports.values()}
            if revisions.has(revision, name)
        }
        pending = [
            node
            for node in names
            if node not in failed and (node not in reports or reports[node].revision not in newest)
        ]
        counts = NodeCounts(len(names), len(names) - len(pending) - len(failed), len(failed))
        accepted = "True", "Valid", "The spec is valid."
        in_force = _programmed(counts, pending, failed)
        if found.is_staged:
            in_force = "False", STAGED, found.staged_text
        elif in_force[0] == "True" and found.rules:
            without = policy_effects.problem(name, found.rules, names, reports, revisions)
            if without is None:
                without = _previous_effect(before, generation)
            if without[0]:
                in_force = "False", without[0], f"{in_force[2][:-1]}; {without[1]}."[:_MAX_MESSAGE]
                accepted = "True", without[0], f"The spec is valid; {without[1]}."[:_MAX_MESSAGE]
        if found.expires and found.expires <= now:
            text = f"It expired at {api_types.time_text(found.expires)}, and admits nothing."
            in_force = "False", EXPIRED, text
        if missing:
            are = "namespace {} does" if len(missing) == 1 else "namespaces {} do"
            clause = f"{are.format(listed(missing, _MAX_NAMES))} not exist"
            accepted = "True", NO_NAMESPACE, f"The spec is valid; {clause}."[:_MAX_MESSAGE]
    since = api_types.time_text(now)
    conditions = tuple(
        _condition(kind, *values, generation=generation, now=since, before=before)
        for kind, values in ((ACCEPTED, accepted), (PROGRAMMED, in_force))
    )
    return PolicyStatus(generation, conditions, counts)


def _previous_effect(before: PolicyStatus | None, generation: int) -> tuple[str, str]:
    """What was known of the policy's effect: a change of another policy does not end that."""
    in_force = before.condition(PROGRAMMED) if before else None
    if in_force is None or in_force.observed_generation != generation:
        return "", ""
    if in_force.reason not in policy_effects.REASONS:
        return "", ""
    return in_force.reason, in_force.message.partition("; ")[2].removesuffix(".")


def _failed(
    name: str, generation: int, names: Collection[str], reports: Mapping[str, NodePolicies]
) -> dict[str, FailedPolicy]:
    """Problems of the newest generation, by node."""
    return {
        node: problem
        for node in names
        if node in reports
        for problem in reports[node].failed
        if (problem.name, problem.generation) == (name, generation)
    }


def _programmed(
    counts: NodeCounts, pending: Sequence[str], failed: Mapping[str, FailedPolicy]
) -> tuple[str, str, str]:
    if not counts.selected:
        return "False", "NoNodeSelected", "No node has the labels of nodeSelector."
    of_all = f"In force on {counts.programmed} of {counts.selected} selected nodes"
    if failed:
        node, problem = min(failed.items())
        return "False", "Failed", f"{of_all}. {node}: {problem.message}"[:_MAX_MESSAGE]
    if pending:
        return "False", "Pending", f"{of_all}; waiting for {listed(sorted(pending), _MAX_NAMES)}."
    return "True", "Programmed", f"In force on all {counts.selected} selected nodes."


def _condition(
    kind: str,
    status: str,
    reason: str,
    message: str,
    *,
    generation: int,
    now: str,
    before: PolicyStatus | None,
) -> Condition:
    """The time of an unchanged status stays."""
    previous = before.condition(kind) if before else None
    since = previous.last_transition_time if previous and previous.status == status else now
    return Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=message,
    )


def read_status(raw: msgspec.Raw) -> PolicyStatus | None:
    """The status in an object; None if there is none, or another program's."""
    try:
        return responses.decode(raw, PolicyStatus)
    except msgspec.DecodeError:
        return None

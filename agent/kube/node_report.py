"""NodeReport of podgate.io/v1alpha1: what one node has in force, for the controller.

deploy/manifests/nodereports.yaml is its definition. Its size hardly depends on the number of
policies: nodes report a hash of all that they have, and the controller knows what each hash means;
beside it one digit for each rule.
"""

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent import labels
from agent.kube.objects import ObjectMetadata

KIND: Final = "NodeReport"
API_VERSION: Final = f"{labels.DOMAIN}/v1alpha1"
PATH: Final = f"/apis/{API_VERSION}/nodereports"

_MAX_FAILED: Final = 64
"""A node with more problems has one cause for all of them."""
_MAX_MESSAGE: Final = 1024


class FailedPolicy(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A policy that is not in force as written, and why, in one sentence."""

    name: str
    generation: int
    message: str = ""


class Effect(enum.IntEnum):
    """Of one rule on one node, the better the higher."""

    NO_POD = 0
    NO_SOURCE = 1
    """Its policy selects a pod, and the rule has found no source, or no port of its name."""
    ADMITS = 2


class NodePolicies(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """HostAccessPolicies on one node. effects: of their rules, in the order of their names, as
    `agent.policy.effects` encodes them; empty if they are not reported."""

    revision: str
    count: int = 0
    failed: tuple[FailedPolicy, ...] = ()
    effects: str = ""

    @classmethod
    def of(
        cls, policies: Sequence[ObjectMetadata], problems: Mapping[str, str], effects: str = ""
    ) -> "NodePolicies":
        """From all policies that the node has, and problems by name."""
        failed = [
            FailedPolicy(one.name, one.generation, problems[one.name][:_MAX_MESSAGE])
            for one in policies
            if one.name in problems
        ]
        return cls(revision(policies), len(policies), tuple(failed[:_MAX_FAILED]), effects)


class NodeSummary(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A node as `kubectl podgate status` counts it, which reads no more of one that is in order.

    problems: findings that are more than a note; desired, in_force: pods by mode, without those of
    the host network.
    """

    default_mode: str = ""
    max_mode: str = ""
    has_kubelet: bool = False
    problems: int = 0
    desired: dict[str, int] = {}
    in_force: dict[str, int] = {}

    @property
    def judgement(self) -> tuple[object, ...]:
        """What does not change while pods of a node that is in order come and go."""
        is_settled = self.desired == self.in_force
        return self.default_mode, self.max_mode, self.has_kubelet, self.problems, is_settled


class NodeStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What the agent has in force."""

    agent_version: str = ""
    policies: NodePolicies | None = None
    summary: NodeSummary | None = None
    egress_policies: NodePolicies | None = None
    """HostEgressPolicies."""

    def differs_from(self, other: "NodeStatus") -> bool:
        """In more than numbers of pods."""
        mine, others = (one.summary and one.summary.judgement for one in (self, other))
        rest, theirs = (
            (one.agent_version, one.policies, one.egress_policies) for one in (self, other)
        )
        return mine != others or rest != theirs


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object, as it is read."""

    metadata: ObjectMetadata
    status: NodeStatus = NodeStatus()


def revision(policies: Iterable[ObjectMetadata]) -> str:
    """A hash of policies: equal on all nodes that have the same versions of the same ones."""
    lines = sorted(f"{one.name} {one.uid} {one.generation}\n" for one in policies)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

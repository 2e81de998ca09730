"""Staged policies (`action: Audit`): what each would admit of the traffic that was observed.

They have no rules in gates, so they open nothing. They are compared with the history of sources
that gates have dropped, or in audit would have dropped.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import core

from agent.admin.observations import Observations, ObservedFlows
from agent.admin.report import PolicyStatus
from agent.metrics import MetricFamily, labelled
from agent.pods.object_labels import LabelSnapshot, ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.policy import replay, rules_report
from agent.policy.api_types import Policy, PolicyRule
from agent.policy.controller import PolicyController
from bpf.verdicts import Mode

STAGED_PACKETS = MetricFamily(
    "podgate_staged_policy_packets",
    "gauge",
    "Observed packets that a policy with action Audit would admit, and no policy in force does: "
    "dropped ones, and in audit those that enforce would drop.",
    ("policy",),
)

# A full history takes a tenth of a second to read; scrapes come more often than it changes.
_REFRESH_SECONDS = 60.0

Packets = Mapping[tuple[str, PolicyRule], int]
"""By the policy's name and its rule."""


class StagedPolicies:
    """Their state on this node. As a collector, `refresh` it before each scrape."""

    def __init__(
        self,
        policy: PolicyController,
        observations: Callable[[], Observations],
        *,
        store: PodStore,
        labels: ObjectLabels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """observations: blocks for some milliseconds."""
        self._policy = policy
        self._observations = observations
        self._store = store
        self._labels = labels
        self._clock = clock
        self._counted: tuple[Policy, ...] = ()
        self._counted_at = float("-inf")
        self._packets: dict[str, int] = {}

    async def statuses(self) -> list[PolicyStatus]:
        """As of policies in force, with packets for hits."""
        if not self._policy.staged:
            return []
        gated = [
            state.pod
            for state in self._store.states()
            if state.pod.mode is not Mode.OFF and not state.pod.host_network
        ]
        packets = await self._read()
        return _statuses(self._policy.staged, packets, gated, self._labels.snapshot())

    async def refresh(self) -> None:
        staged, now = self._policy.staged, self._clock()
        if staged == self._counted and now - self._counted_at < _REFRESH_SECONDS:
            return
        counter: collections.Counter[str] = collections.Counter()
        for (policy, _), count in (await self._read() if staged else {}).items():
            counter[policy] += count
        self._packets, self._counted, self._counted_at = dict(counter), staged, now

    def collect(self) -> Iterator[core.Metric]:
        yield labelled(STAGED_PACKETS, (((name,), count) for name, count in self._packets.items()))

    async def _read(self) -> Packets:
        return await asyncio.to_thread(self._count, self._policy.staged, self._policy.policies)

    def _count(self, staged: Sequence[Policy], in_force: Sequence[Policy]) -> Packets:
        return packets_by_rule(staged, in_force, self._observations().flows)


def packets_by_rule(
    staged: Sequence[Policy], in_force: Sequence[Policy], flows: Sequence[ObservedFlows]
) -> Packets:
    """Observed packets that each rule would admit, and no policy in force does by now."""
    found = {(policy.name, rule): 0 for policy in staged for rule in policy.rules}
    for one in flows:
        admitting = [
            (policy.name, rule) for policy in staged for rule in replay.admitting_rules(policy, one)
        ]
        if admitting and not replay.is_admitted(in_force, one):
            for key in admitting:
                found[key] += one.packets
    return found


def _statuses(
    staged: Sequence[Policy], packets: Packets, gated: Sequence[Pod], labels: LabelSnapshot
) -> list[PolicyStatus]:
    return [
        rules_report.policy_status(
            policy,
            [
                pod
                for pod in gated
                if policy.pods.matches(
                    pod.namespace, pod.labels, labels.of_namespace(pod.namespace)
                )
            ],
            hits=[packets[policy.name, rule] for rule in policy.rules],
            problems=[""] * len(policy.rules),
            skipped={},
        )
        for policy in staged
    ]

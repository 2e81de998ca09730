"""What is reported of HostEgressPolicies: in force, attempts by policy and by source."""

import asyncio
from collections.abc import Iterator

from prometheus_client import core

from agent.admin.report import EgressPolicyStatus, EgressSourceStatus
from agent.drops.source_processes import SourceProcesses, protocol_word, wall_clock
from agent.metrics import MetricFamily, labelled
from agent.policy.egress import HostEgressPolicies
from bpf.host_egress_tables import EgressSource
from bpf.verdicts import Verdict

ATTEMPTS = MetricFamily(
    "podgate_host_egress_attempts_total",
    "counter",
    "Connects, datagrams and packets of subjects to destinations that a HostEgressPolicy denies, "
    "by verdict: would-drop for a policy with action Audit.",
    ("policy", "verdict"),
)
SOURCE_ATTEMPTS = MetricFamily(
    "podgate_host_egress_source_attempts",
    "gauge",
    "The same by the cgroup of the subject, for the 4,096 latest sources.",
    ("policy", "source", "verdict"),
)
POLICIES = MetricFamily(
    "podgate_host_egress_policies",
    "gauge",
    "HostEgressPolicies of this node by action.",
    ("action",),
)


class HostEgressReport:
    """`refresh` it before each scrape: maps are read in a thread."""

    def __init__(self, policies: HostEgressPolicies, names: SourceProcesses) -> None:
        """names: of cgroups."""
        self._policies = policies
        self._names = names
        self._counts: dict[tuple[str, Verdict], int] = {}
        self._sources: list[EgressSource] = []

    async def refresh(self) -> None:
        await asyncio.to_thread(self._read)

    async def statuses(self) -> list[EgressPolicyStatus]:
        """Of each policy of this node, by name."""
        await self.refresh()
        state = self._policies.state
        return [
            EgressPolicyStatus(
                name=policy.name,
                source=policy.source,
                action=policy.document.spec.action,
                subjects=[str(one) for one in policy.subjects],
                excepted=[str(one) for one in policy.excepted],
                denied=[str(one) for one in policy.destinations],
                would_drop=self._counts.get((policy.name, Verdict.WOULD_DROP), 0),
                drop=self._counts.get((policy.name, Verdict.DROP), 0),
                sources=[
                    self._source(one)
                    for one in sorted(self._sources, key=lambda one: -one.count)
                    if one.policy == policy.name
                ],
                problems=list(state.problems.get(policy.name, ())),
                generation=policy.generation,
            )
            for policy in sorted(state.policies, key=lambda one: one.name)
        ]

    def collect(self) -> Iterator[core.Metric]:
        """Absent without a policy."""
        actions = [policy.document.spec.action for policy in self._policies.state.policies]
        if not actions:
            return
        yield labelled(POLICIES, (((one,), actions.count(one)) for one in sorted(set(actions))))
        yield labelled(
            ATTEMPTS,
            (((name, verdict.label), count) for (name, verdict), count in self._counts.items()),
        )
        by_source: dict[tuple[str, str, str], int] = {}
        for one in self._sources:
            key = one.policy, self._names.cgroup_path(one.cgroup), one.verdict.label
            by_source[key] = by_source.get(key, 0) + one.count
        yield labelled(SOURCE_ATTEMPTS, by_source.items())

    def _read(self) -> None:
        self._counts, self._sources = self._policies.counts(), self._policies.sources()
        self._names.learn({one.cgroup for one in self._sources})

    def _source(self, one: EgressSource) -> EgressSourceStatus:
        return EgressSourceStatus(
            cgroup=self._names.cgroup_path(one.cgroup),
            process=one.process_name,
            protocol=protocol_word(one.protocol),
            verdict=one.verdict.label,
            attempts=one.count,
            first=wall_clock(one.first_ns),
            last=wall_clock(one.last_ns),
        )

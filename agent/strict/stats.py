"""Connection statistics of the relay, by pod, container and handler.

The kubelet does not label its connections, so the port decides: the handlers of the pod's spec that
use it.
"""

import collections
import dataclasses
from collections.abc import Container, Iterable, Iterator

from agent.admin.report import RelayedPortStatus
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.relay.messages import (
    OPEN_BUCKETS,
    AnswerOutcome,
    AnswerSample,
    Outcome,
    OutcomeSample,
)
from agent.strict import targets as relay_targets

_REDIRECT = "redirect"
# The pod responded, so the duration is that of its response.
_ANSWERED: frozenset[Outcome] = frozenset({"proxied", "reset", "refused"})


@dataclasses.dataclass(frozen=True, slots=True)
class PortPurpose:
    """Containers and handlers that use a port; several are joined by a plus."""

    container: str
    handler: str
    port: int


@dataclasses.dataclass(slots=True)
class OutcomeStats:
    """Outcomes and connect durations. buckets: as `OPEN_BUCKETS`, of connections with a response
    by the pod."""

    outcomes: dict[Outcome, int] = dataclasses.field(default_factory=dict)
    last: Outcome = "proxied"
    answered: int = 0
    open_seconds: float = 0.0
    buckets: list[int] = dataclasses.field(default_factory=lambda: [0] * len(OPEN_BUCKETS))

    def add(self, sample: OutcomeSample) -> None:
        self.outcomes[sample.outcome] = self.outcomes.get(sample.outcome, 0) + sample.count
        self.last = sample.outcome
        if sample.outcome in _ANSWERED:
            self.answered += sample.count
            self.open_seconds += sample.open_seconds
            for index, count in enumerate(sample.buckets):
                self.buckets[index] += count

    def merge(self, other: "OutcomeStats") -> None:
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.answered += other.answered
        self.open_seconds += other.open_seconds
        self.buckets = [sum(counts) for counts in zip(self.buckets, other.buckets, strict=True)]


class AnswerStats:
    """Connections to ports with answered probes, since the agent's start, for existing pods."""

    def __init__(self, store: PodStore) -> None:
        self._store = store
        self._counts: dict[str, collections.Counter[tuple[PortPurpose, AnswerOutcome]]] = {}

    def add(self, samples: Iterable[AnswerSample]) -> None:
        for sample in samples:
            uid = relay_targets.uid_of(sample.key)
            if (state := self._store.get(uid)) is None:
                continue  # deleted meanwhile
            counts = self._counts.setdefault(uid, collections.Counter())
            counts[purpose_of(state.pod, sample.port), sample.outcome] += sample.count

    def keep_only(self, uids: Container[str]) -> None:
        """Remove deleted pods."""
        for uid in [uid for uid in self._counts if uid not in uids]:
            del self._counts[uid]

    def items(self) -> Iterator[tuple[Pod, PortPurpose, AnswerOutcome, int]]:
        """The counts of all existing pods."""
        for uid, counts in self._counts.items():
            if state := self._store.get(uid):
                for (purpose, outcome), count in counts.items():
                    yield state.pod, purpose, outcome, count


class ConnectionStats:
    """Sums of all samples since the agent's start, for existing pods."""

    def __init__(self, store: PodStore) -> None:
        self._store = store
        self._stats: dict[str, dict[PortPurpose, OutcomeStats]] = {}
        self.answers = AnswerStats(store)
        self.unknown_address = 0
        """Connections to relay addresses without a pod."""

    def add(self, samples: Iterable[OutcomeSample]) -> None:
        for sample in samples:
            if not sample.key:
                self.unknown_address += sample.count
                continue
            uid = relay_targets.uid_of(sample.key)
            if (state := self._store.get(uid)) is None:
                continue  # deleted meanwhile
            stats = self._stats.setdefault(uid, {})
            stats.setdefault(purpose_of(state.pod, sample.port), OutcomeStats()).add(sample)

    def keep_only(self, uids: Container[str]) -> None:
        """Remove deleted pods."""
        self.answers.keep_only(uids)
        for uid in [uid for uid in self._stats if uid not in uids]:
            del self._stats[uid]

    def of(self, uid: str) -> dict[PortPurpose, OutcomeStats]:
        return self._stats.get(uid, {})

    def items(self) -> Iterator[tuple[Pod, PortPurpose, OutcomeStats]]:
        """The statistics of all existing pods."""
        for uid, by_purpose in self._stats.items():
            if state := self._store.get(uid):
                for purpose, stats in by_purpose.items():
                    yield state.pod, purpose, stats

    def status(self, uid: str) -> list[RelayedPortStatus]:
        """The pod's, for `podgate status`."""
        return [
            RelayedPortStatus(
                container=purpose.container,
                handler=purpose.handler,
                port=purpose.port,
                last_outcome=stats.last,
                outcomes={str(outcome): count for outcome, count in stats.outcomes.items()},
                open_ms=1000 * stats.open_seconds / stats.answered if stats.answered else None,
            )
            for purpose, stats in sorted(
                self.of(uid).items(), key=lambda item: (item[0].port, item[0].handler)
            )
        ]


def purpose_of(pod: Pod, port: int) -> PortPurpose:
    """For an undeclared port: a redirect if the pod has an http probe, else an empty handler."""
    users = [user for user in pod.spec.port_users if user.port == port]
    if users:
        return PortPurpose(
            "+".join(dict.fromkeys(user.container for user in users)),
            "+".join(dict.fromkeys(user.handler for user in users)),
            port,
        )
    # Without the port's number: a server may redirect the kubelet to any port.
    return PortPurpose("", _REDIRECT if pod.spec.declared.any_port else "", 0)

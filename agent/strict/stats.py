"""What relays carried, by pod, container and handler: the kubelet's probes and hooks as seen here.

The kubelet does not say what a connection is for, so it goes by the port: who of the pod's manifest
is asked there.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator

from agent.admin.report import CarriedStatus
from agent.pods.pod import Pod
from agent.relay.messages import OPEN_BUCKETS, Outcome, Sample
from agent.strict import targets as relay_targets

_REDIRECT = "redirect"
# The pod answered, so how long it took is its answer's time.
_ANSWERED: frozenset[Outcome] = frozenset({"carried", "reset", "refused"})


@dataclasses.dataclass(frozen=True, slots=True)
class Purpose:
    """Whom connections to one port are for; several who share it are joined by a plus."""

    container: str
    handler: str
    port: int


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of them. buckets: as `OPEN_BUCKETS`, of those that the pod answered."""

    outcomes: dict[Outcome, int] = dataclasses.field(default_factory=dict)
    last: Outcome = "carried"
    answered: int = 0
    open_seconds: float = 0.0
    buckets: list[int] = dataclasses.field(default_factory=lambda: [0] * len(OPEN_BUCKETS))

    def add(self, sample: Sample) -> None:
        self.outcomes[sample.outcome] = self.outcomes.get(sample.outcome, 0) + sample.count
        self.last = sample.outcome
        if sample.outcome in _ANSWERED:
            self.answered += sample.count
            self.open_seconds += sample.open_seconds
            for index, count in enumerate(sample.buckets):
                self.buckets[index] += count

    def merge(self, other: "Tally") -> None:
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        self.answered += other.answered
        self.open_seconds += other.open_seconds
        self.buckets = [one + more for one, more in zip(self.buckets, other.buckets, strict=True)]


class Carried:
    """Sums of all samples since the agent started, for pods that are there."""

    def __init__(self, pod_of: Callable[[str], Pod | None]) -> None:
        """pod_of: by uid."""
        self._pod_of = pod_of
        self._tallies: dict[str, dict[Purpose, Tally]] = {}
        self.unknown = 0
        """Connections to addresses of a relay that stand for no pod."""

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if not sample.key:
                self.unknown += sample.count
                continue
            uid = relay_targets.uid_of(sample.key)
            if (pod := self._pod_of(uid)) is None:
                continue  # it ended since
            tallies = self._tallies.setdefault(uid, {})
            tallies.setdefault(purpose_of(pod, sample.port), Tally()).add(sample)

    def keep_only(self, uids: Container[str]) -> None:
        """Forget pods that are gone."""
        for uid in [uid for uid in self._tallies if uid not in uids]:
            del self._tallies[uid]

    def of(self, uid: str) -> dict[Purpose, Tally]:
        return self._tallies.get(uid, {})

    def all(self) -> Iterator[tuple[Pod, Purpose, Tally]]:
        """Everything that is known of pods that are there."""
        for uid, tallies in self._tallies.items():
            if pod := self._pod_of(uid):
                for purpose, tally in tallies.items():
                    yield pod, purpose, tally

    def status(self, uid: str) -> list[CarriedStatus]:
        """The pod's, for `podgate status`."""
        return [
            CarriedStatus(
                container=purpose.container,
                handler=purpose.handler,
                port=purpose.port,
                last_outcome=tally.last,
                outcomes={str(outcome): count for outcome, count in tally.outcomes.items()},
                open_ms=1000 * tally.open_seconds / tally.answered if tally.answered else None,
            )
            for purpose, tally in sorted(
                self.of(uid).items(), key=lambda item: (item[0].port, item[0].handler)
            )
        ]


def purpose_of(pod: Pod, port: int) -> Purpose:
    """Where nobody declares the port: a redirect if the pod has an http probe, else nobody."""
    users = [user for user in pod.spec.port_users if user.port == port]
    if users:
        return Purpose(
            "+".join(dict.fromkeys(user.container for user in users)),
            "+".join(dict.fromkeys(user.handler for user in users)),
            port,
        )
    # Not by its number: whoever is asked may send the kubelet to any port.
    return Purpose("", _REDIRECT if pod.spec.declared.any_port else "", 0)

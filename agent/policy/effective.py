"""What is in force of several files, or of files and the API server; what is said of the rest."""

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import structlog

from agent.policy import api_types
from agent.policy.api_types import Policy

log = structlog.get_logger(__name__)

# A file that is something else altogether may be wrong in thousands of places.
_MAX_PROBLEMS = 20
_MAX_PROBLEM = 500


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyBatch:
    """What comes from one place. name: for people; problems: one sentence each."""

    name: str
    policies: tuple[Policy, ...] = ()
    problems: tuple[str, ...] = ()


class PolicyProvider(Protocol):
    """Where policies come from. `restore` and `refresh` block: for a thread, one at a time."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def batch(self) -> PolicyBatch:
        """What is in force of it, in the order in which it came."""

    @property
    def problem(self) -> str:
        """Why it is not followed now, in one sentence, or nothing."""

    def restore(self) -> None:
        """Take up what an earlier run saved. To be called once, first."""

    def refresh(self) -> bool:
        """Take in what changed since the last look; whether anything did."""

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        """One item whenever there may be something to look at, or after so long; for ever."""


class EffectivePolicies:
    """All sources together. Of two policies with one name that of the earlier source is in force:
    first come, first served would be another one after a restart.
    """

    def __init__(self, sources: Sequence[PolicyProvider]) -> None:
        self._sources = sources
        self._logged: tuple[str, ...] | None = None
        self.policies: tuple[Policy, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the sources, for people."""
        return [source.name for source in self._sources]

    @property
    def problems(self) -> list[str]:
        """One sentence for each policy that is not in force as it stands, and for what is away."""
        away = [source.problem for source in self._sources if source.problem]
        return [*(self._logged or ()), *away]

    def restore(self) -> None:
        """Take up what an earlier run saved. Blocks."""
        for source in self._sources:
            source.restore()

    def refresh(self) -> bool:
        """Take in what changed since the last look; whether anything did. Blocks."""
        looked = [source.refresh() for source in self._sources]
        if self._logged is not None and not any(looked):
            return False
        batches = [source.batch for source in self._sources]
        joined = join(batches, name=" together with ".join(one.name for one in batches))
        for problem in joined.problems:
            if problem not in (self._logged or ()):
                log.warning("policy problem", problem=problem)
        self.policies, self._logged = joined.policies, joined.problems
        return True

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        """One item whenever there may be something to look at, or after so long; for ever."""
        # What the others have to say waits no longer than that.
        return self._sources[0].changes(at_least_every_seconds=at_least_every_seconds)


def join(batches: Iterable[PolicyBatch], *, name: str) -> PolicyBatch:
    """All together: of two policies with one name the first is in force. name: of the whole."""
    active: dict[str, Policy] = {}
    problems: list[str] = []
    too_many = 0
    for batch in batches:
        twins: list[str] = []
        for policy in batch.policies:
            if twin := active.get(policy.name):
                twins.append(
                    f"{policy.source} describes policy {policy.name}, which {twin.source} "
                    "describes already; remove one of the two."
                )
            elif len(active) == api_types.MAX_POLICIES:
                too_many += 1
            else:
                active[policy.name] = policy
        problems += [*batch.problems, *abridged(twins, batch.name)]
    if too_many:
        problems.append(
            f"{name} holds {too_many} policies more than the {api_types.MAX_POLICIES:,} that can "
            "be in force; those that came last are left out."
        )
    return PolicyBatch(name, tuple(active.values()), tuple(problems))


def sentence(problem: str, *, uses_last_good: bool) -> str:
    """A problem for people. is_kept: whether an earlier version is in force instead."""
    ending = " The last good one stays in force." if uses_last_good else ""
    return f"{problem[:_MAX_PROBLEM]}.{ending}"


def abridged(problems: list[str], name: str) -> list[str]:
    """No more of them than somebody reads."""
    if len(problems) <= _MAX_PROBLEMS:
        return problems
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], f"{name} has {more:,} problems more like these."]

"""Effective policies: those of all sources, merged, with the problems of the others."""

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Generic, Protocol

import structlog

from agent import tasks
from agent.logs import Event
from agent.policy import api_types
from agent.policy.api_types import Policy
from agent.policy.kinds import P

log = structlog.get_logger(__name__)

# A file of a different kind may have thousands of mistakes.
_MAX_PROBLEMS = 20
_MAX_PROBLEM = 500


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyBatch(Generic[P]):
    """The policies of one source. name: for messages; problems: one sentence each."""

    name: str
    policies: tuple[P, ...] = ()
    problems: tuple[str, ...] = ()


class PolicyProvider(Protocol[P]):
    """A source of policies. `restore` and `refresh` block: for a thread, one at a time."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def batch(self) -> PolicyBatch[P]:
        """Its policies in force, in order of arrival."""

    @property
    def problem(self) -> str:
        """Why it cannot be followed now, in one sentence; else empty."""

    def restore(self) -> None:
        """Restore what the previous run saved. Called once, first."""

    def refresh(self) -> bool:
        """Read changes since the last refresh; returns whether there were any."""

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        """Yields when `refresh` may find changes, and after this time without any; never ends."""


class EffectivePolicies:
    """The policies of all sources. Of two policies with one name that of the first source is in
    force: if it were the first to arrive, a restart could change it.
    """

    def __init__(
        self, sources: Sequence[PolicyProvider[Policy]], *, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: Unix time, by which policies expire."""
        self._sources = sources
        self._clock = clock
        self._logged: tuple[str, ...] | None = None
        self._next_expiry = math.inf
        self.policies: tuple[Policy, ...] = ()
        """Those that admit their sources."""
        self.staged: tuple[Policy, ...] = ()
        """Those with action Audit, which admit nothing."""
        self.expired: tuple[Policy, ...] = ()
        """Those that admit nothing any more."""

    @property
    def names(self) -> list[str]:
        """Of the sources, for messages."""
        return [source.name for source in self._sources]

    @property
    def problems(self) -> list[str]:
        """One sentence for each policy not in force as written, and for each unreachable source."""
        unreachable = [source.problem for source in self._sources if source.problem]
        return [*(self._logged or ()), *unreachable]

    def restore(self) -> None:
        """Restore what the previous run saved. Blocks."""
        for source in self._sources:
            source.restore()

    def refresh(self) -> bool:
        """Read changes since the last refresh; returns whether there were any, or whether a policy
        has expired. Blocks."""
        changed = [source.refresh() for source in self._sources]
        now = self._clock()
        if self._logged is not None and not any(changed) and now < self._next_expiry:
            return False
        batches = [source.batch for source in self._sources]
        joined = join(batches, name=" together with ".join(batch.name for batch in batches))
        for problem in joined.problems:
            if problem not in (self._logged or ()):
                log.warning(Event.POLICY_PROBLEM, problem=problem)
        self._logged = joined.problems
        by_expiry = [(policy.expires or math.inf, policy) for policy in joined.policies]
        current = [policy for expires, policy in by_expiry if now < expires]
        self.policies = tuple(policy for policy in current if not policy.is_staged)
        self.staged = tuple(policy for policy in current if policy.is_staged)
        before, self.expired = (
            self.expired,
            tuple(policy for expires, policy in by_expiry if expires <= now),
        )
        self._next_expiry = min(
            (expires for expires, _ in by_expiry if now < expires), default=math.inf
        )
        for policy in self.expired:
            if policy not in before:
                log.info(Event.POLICY_EXPIRED, policy=policy.name, expires=policy.expires_text)
        return True

    async def follow(self, wake: asyncio.Event, *, at_least_every_seconds: float) -> None:
        """Set `wake` when `refresh` may find changes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            follow(group, self._sources, wake, at_least_every_seconds=at_least_every_seconds)


def follow(
    group: asyncio.TaskGroup,
    sources: Sequence[PolicyProvider[P]],
    wake: asyncio.Event,
    *,
    at_least_every_seconds: float,
) -> None:
    """Start tasks that set `wake` when a source's `refresh` may find changes."""
    for source in sources:
        tasks.start(
            group,
            f"policies of {source.name}",
            functools.partial(_follow, source, wake, at_least_every_seconds),
        )


async def _follow(source: PolicyProvider[P], wake: asyncio.Event, seconds: float) -> None:
    async for _ in source.changes(at_least_every_seconds=seconds):
        wake.set()


def join(batches: Iterable[PolicyBatch[P]], *, name: str) -> PolicyBatch[P]:
    """Merge batches: of two policies with one name the first is in force."""
    active: dict[str, P] = {}
    problems: list[str] = []
    too_many = 0
    for batch in batches:
        duplicates: list[str] = []
        for policy in batch.policies:
            if first := active.get(policy.name):
                duplicates.append(
                    f"{policy.source} has policy {policy.name}, which {first.source} already has; "
                    "remove one of the two."
                )
            elif len(active) == api_types.MAX_POLICIES:
                too_many += 1
            else:
                active[policy.name] = policy
        problems += [*batch.problems, *abridged(duplicates, batch.name)]
    if too_many:
        problems.append(
            f"{name} has {too_many} policies more than the maximum of {api_types.MAX_POLICIES:,}; "
            "the last ones are ignored."
        )
    return PolicyBatch(name, tuple(active.values()), tuple(problems))


def sentence(problem: str, *, uses_last_good: bool) -> str:
    """A problem for people. is_kept: whether an earlier version is in force instead."""
    ending = " The last valid version stays in force." if uses_last_good else ""
    return f"{problem[:_MAX_PROBLEM]}.{ending}"


def abridged(problems: list[str], name: str) -> list[str]:
    """At most as many as a reader can use."""
    if len(problems) <= _MAX_PROBLEMS:
        return problems
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], f"{name} has {more:,} more problems."]

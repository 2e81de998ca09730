"""The relay that serves: its targets, and whether it still reports."""

import dataclasses
from collections.abc import Mapping

import msgspec

from agent.relay import messages
from agent.strict import targets as relay_targets
from agent.strict.launcher import RelayHandle
from agent.strict.process import RelayError

CHECK_SECONDS = 1.0
_CHECK_SLACK_SECONDS = 0.1
# A relay reports once a second. Checks are counted instead of seconds: when this process was
# stopped, its relay was not.
_MAX_MISSED_REPORTS = 3


def blocked(way_problem: str) -> str:
    """Why a relay is not used whose way is not free, as a clause."""
    return f"the node does not reach the relay: {way_problem}"


@dataclasses.dataclass(slots=True)
class ActiveRelay:
    """A relay that is engaged, or is about to be."""

    relay: RelayHandle
    since: float
    whole_due_at: float
    """When it gets all targets again."""
    revision: int = 0
    applied_targets: tuple[messages.RelayTargetSpec, ...] | None = None
    active_targets: dict[str, messages.RelayTargetSpec] = dataclasses.field(default_factory=dict)
    answered_targets: dict[str, list[messages.RelayTargetSpec]] = dataclasses.field(
        default_factory=dict
    )
    """Those of the active targets that have answers, by the pod's uid."""
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reports: int = 0
    missed_checks: int = 0
    """Consecutive checks without a new report."""
    checked_at: float = 0.0
    unneeded_since: float | None = None
    routes_due_at: float = 0.0
    way_problem: str = ""
    """Why the node's connections do not reach it, as a clause."""

    @property
    def problem(self) -> str:
        """Why the relay no longer works; empty while it does."""
        problem = self.relay.channel.problem
        if problem is not None:
            return f"the relay failed: {problem}"
        return blocked(self.way_problem) if self.way_problem else ""

    async def set_targets(self, targets: tuple[messages.RelayTargetSpec, ...]) -> set[str]:
        """Sends what differs from the targets that were applied before, all if that is not certain.
        Those that were rejected are tried again. Returns the uids of pods with a target that is
        another than before. Raises `RelayError`."""
        before, sent = self.active_targets, self.applied_targets
        self.applied_targets = None
        self.revision += 1
        message: messages.SetTargets | messages.ChangeTargets
        if sent is None:
            message = messages.SetTargets(self.revision, targets)
        else:
            # A plan has the same object while a target stays as it is.
            current = {target.key for target in targets}
            changed_targets = [each for each in targets if before.get(each.key) is not each]
            removed = [each.key for each in sent if each.key not in current]
            message = messages.ChangeTargets(self.revision, tuple(changed_targets), tuple(removed))
        applied = await self.relay.channel.request(message, messages.TargetsApplied)
        if applied.revision != self.revision:
            raise RelayError(f"it has revision {applied.revision}, not {self.revision}")
        self.applied_targets = targets
        changed = self.rejected.items() ^ applied.rejected.items()
        self.rejected = applied.rejected
        self.active_targets = {
            target.key: target for target in targets if target.key not in applied.rejected
        }
        self.answered_targets = {}
        for target in self.active_targets.values():
            if target.answers:
                uid = relay_targets.uid_of(target.key)
                self.answered_targets.setdefault(uid, []).append(target)
        keys = {key for key, _ in changed}
        keys |= before.keys() ^ self.active_targets.keys()
        keys |= {key for key, one in self.active_targets.items() if before.get(key) is not one}
        return {relay_targets.uid_of(key) for key in keys}

    def proxies(
        self, target: messages.RelayTargetSpec, planned: messages.RelayTargetSpec | None
    ) -> bool:
        """Whether connections to this target are proxied; answers are no part of that.

        planned: the same with the claims that are granted, None if it is not planned yet.
        """
        active = self.active_targets.get(target.key)
        if active is None or planned is None:
            return False
        if msgspec.structs.replace(active, answers=planned.answers) != planned:
            return False
        ungranted = msgspec.structs.replace(planned, claims=target.claims, answers=(), sharing=None)
        return ungranted == target

    def is_silent(self, now: float) -> bool:
        """Whether reports are missing. To be called in each pass; passes within a second count as
        one check."""
        if now - self.checked_at < CHECK_SECONDS - _CHECK_SLACK_SECONDS:
            return False
        self.checked_at = now
        reports = self.relay.channel.reports
        self.missed_checks = 0 if reports > self.reports else self.missed_checks + 1
        self.reports = reports
        return self.missed_checks >= _MAX_MISSED_REPORTS

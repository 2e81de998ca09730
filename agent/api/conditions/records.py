"""One condition that an owner has reported, as it is shown and saved. No I/O."""

import dataclasses
import datetime

import msgspec

from agent.api.conditions.validation import OWNER_GONE, SANDBOX_CHANGED
from agent.pods.conditions import FALSE

_RESET = "The last report was about a deleted sandbox; its owner has not reported since."


class SavedCondition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One condition in the state file, as the fields of `OwnedCondition`."""

    uid: str
    type: str
    status: str
    reason: str
    message: str
    sandbox: str
    stale_status: str | None
    gone_since: datetime.datetime | None
    since: datetime.datetime


class SavedConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The state file. boot: the kernel's boot id, without which the rest means nothing."""

    boot: str
    conditions: list[SavedCondition]


@dataclasses.dataclass(slots=True)
class OwnedCondition:
    """A condition, as it was last reported. It is of no other sandbox than `sandbox` (empty if the
    pod had none yet), and present while `session` is open."""

    status: str
    reason: str
    message: str
    sandbox: str
    since: datetime.datetime
    """When the shown status changed last."""
    session: int | None = None
    left_at: float = 0.0
    """When its session ended, by the event loop's clock."""
    gone_since: datetime.datetime | None = None
    """The same for people."""
    stale_status: str | None = None
    """The status that is shown, once the owner has been gone for too long."""

    @property
    def shown(self) -> tuple[str, str, str]:
        """Status, reason and message."""
        if self.stale_status is None or self.reason == OWNER_GONE:
            return self.status, self.reason, self.message
        since = self.gone_since.isoformat(timespec="seconds") if self.gone_since else "the start"
        last = f"{self.status} ({self.reason}) {self.message}".strip()
        return (
            self.stale_status,
            OWNER_GONE,
            f"Its owner has been gone since {since}; its last report: {last}",
        )

    @property
    def is_reset(self) -> bool:
        """Whether nothing was reported of the sandbox yet, and something was of a previous one."""
        return self.reason == SANDBOX_CHANGED

    def report(self, status: str, reason: str, message: str, now: datetime.datetime) -> bool:
        """Replace the last report; whether what is shown changes."""
        before = self.shown
        self.status, self.reason, self.message = status, reason, message
        self.stale_status = None
        return self._changed(before, now)

    def reset(self, sandbox: str, now: datetime.datetime) -> None:
        """The pod has another sandbox, about which nothing is reported yet."""
        self.sandbox = sandbox
        self.report(FALSE, SANDBOX_CHANGED, _RESET, now)

    def expire(self, status: str, now: datetime.datetime) -> bool:
        """Its owner has been gone for too long: show this status; whether that is a change."""
        before = self.shown
        self.stale_status = status
        return self._changed(before, now)

    def _changed(self, before: tuple[str, str, str], now: datetime.datetime) -> bool:
        if self.shown[0] != before[0]:
            self.since = now
        return self.shown != before

    def saved(self, uid: str, kind: str) -> SavedCondition:
        return SavedCondition(
            uid=uid,
            type=kind,
            status=self.status,
            reason=self.reason,
            message=self.message,
            sandbox=self.sandbox,
            stale_status=self.stale_status,
            gone_since=self.gone_since,
            since=self.since,
        )

    @classmethod
    def restored(cls, saved: SavedCondition, left_at: float) -> "OwnedCondition":
        """As it was, without its session."""
        return cls(
            saved.status,
            saved.reason,
            saved.message,
            saved.sandbox,
            saved.since,
            left_at=left_at,
            gone_since=saved.gone_since,
            stale_status=saved.stale_status,
        )

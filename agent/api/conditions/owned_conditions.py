"""Conditions that owners have reported: held while the owner is present, stale when it is gone.

A condition is present while the stream is open that reported it last. Afterwards it stays as it is
for `staleAfterSeconds`, in which a restarted owner reports it again; then it has the status of
`whenStale`. An owner that is present is never waited for, and nothing polls: the kernel closes the
connection of a process that ends.

A condition is true of one sandbox. When the pod gets another one, it is False until it is reported
again, as podgate's own are. The writer (agent/kube/condition_writer.py) keeps the API in step.
"""

import asyncio
import collections
import datetime
from collections.abc import Callable, Iterator, Mapping

import grpc
import structlog

from agent.api.conditions import validation
from agent.api.conditions.owner import ConditionOwner, domain_of
from agent.api.conditions.records import OwnedCondition, SavedConditions
from agent.api.conditions.validation import RejectedError
from agent.client.v1alpha1 import conditions_pb2
from agent.kube import patches
from agent.kube.objects import ApiPod, PodCondition
from agent.kube.pod_reports import transition_time
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod

log = structlog.get_logger(__name__)

_TICK_SECONDS = 0.01

_Key = tuple[str, str]
"""The uid of a pod and the type of a condition."""


class Session:
    """One open stream of an owner."""

    def __init__(self, number: int, domain: str) -> None:
        self.number = number
        self.domain = domain
        self.resets: dict[_Key, None] = {}
        """Conditions that it is to report again."""
        self.wake = asyncio.Event()
        """Set when there are some, and when the owner's registration has changed."""


class OwnedConditions:
    """All of them, of all owners. For the event loop."""

    def __init__(
        self,
        conditions: Conditions,
        *,
        pod_of: Callable[[str], Pod | None],
        sandbox_of: Callable[[str], str],
        has_all_pods: Callable[[], bool],
        boot: str,
        on_change: Callable[[], None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        """conditions: where they are published; pod_of, sandbox_of: by the runtime's uid, the
        latter empty if unknown; has_all_pods: whether other uids are of no pod; boot: the kernel's
        boot id; on_change: what is to be saved has changed."""
        self.owners: Mapping[str, ConditionOwner] | None = None
        """By domain; None until they are known."""
        self.changes = collections.Counter[str]()
        """By domain: reports that changed something, and removals."""
        self._conditions = conditions
        self._pod_of = pod_of
        self._sandbox_of = sandbox_of
        self._has_all_pods = has_all_pods
        self._boot = boot
        self._on_change = on_change
        self._now = now
        self._held: dict[str, dict[str, OwnedCondition]] = {}
        self._seen_in_api: set[str] = set()
        self._sessions: dict[int, Session] = {}
        self._next_session = 0
        self._gone_since: dict[str, datetime.datetime] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def set_owners(self, owners: Mapping[str, ConditionOwner]) -> None:
        """The registrations are these; what others have reported is removed from all pods."""
        self.owners = dict(owners)
        now = self._now()
        for domain in owners:
            # Gone since the start, until it opens a session.
            self._gone_since.setdefault(domain, now)
        removed: collections.Counter[str] = collections.Counter()
        for uid, kind, record in list(self._records()):
            owner = owners.get(domain_of(kind))
            if owner is None:
                removed[domain_of(kind)] += 1
                self._remove(uid, kind)
            elif record.stale_status is not None:
                record.expire(owner.stale_status(record.status), now)
                self._show(uid, kind, record)
        for domain, count in removed.items():
            log.info(Event.CONDITION_OWNER_REMOVED, owner=domain, conditions=count)
        for domain in owners:
            self._schedule(domain)
        for session in self._sessions.values():
            session.wake.set()
        # What the API server has of others is to be compared again.
        for uid in self._seen_in_api:
            self._conditions.changes.mark(uid)
        self._on_change()

    def open(self, domain: str) -> Session:
        """A session of an owner begins."""
        self._next_session += 1
        session = Session(self._next_session, domain)
        was_gone = not self.is_present(domain)
        self._sessions[session.number] = session
        self._gone_since.pop(domain, None)
        if was_gone:
            log.info(Event.CONDITION_OWNER_CONNECTED, owner=domain)
        return session

    def close(self, session: Session) -> None:
        """A session has ended; its conditions wait for the next one."""
        del self._sessions[session.number]
        loop, now = asyncio.get_running_loop(), self._now()
        for _, _, record in self._records():
            if record.session == session.number:
                record.session, record.left_at, record.gone_since = None, loop.time(), now
        if not self.is_present(session.domain):
            self._gone_since[session.domain] = now
            log.info(Event.CONDITION_OWNER_DISCONNECTED, owner=session.domain)
        self._schedule(session.domain)
        self._on_change()

    def is_present(self, domain: str) -> bool:
        """Whether a session of this owner is open."""
        return any(session.domain == domain for session in self._sessions.values())

    def gone_since(self, domain: str) -> datetime.datetime | None:
        """Since when it has none."""
        return self._gone_since.get(domain)

    def report(self, session: Session, condition: conditions_pb2.Condition) -> str:
        """A session reports a condition; returns the sandbox that it is about. Raises
        `RejectedError`."""
        owner = self._owner_of(session)
        validation.check(condition, owner)
        uid, kind = condition.pod_uid, condition.type
        pod = self._pod_of(uid)
        if pod is None or not pod.is_described:
            raise RejectedError(
                grpc.StatusCode.NOT_FOUND, f"this node has no pod of uid {uid[:64]!r}"
            )
        sandbox = self._sandbox_of(uid)
        held = self._held.get(uid, {})
        record = held.get(kind)
        is_outdated = condition.sandbox and sandbox and condition.sandbox != sandbox
        may_be_outdated = condition.is_repeated and record and record.is_reset
        if is_outdated or may_be_outdated:
            if record:
                record.session = session.number
            raise RejectedError(
                grpc.StatusCode.ABORTED,
                f"the pod {pod.full_name} has another sandbox since this report; check it again",
            )
        if record is None:
            number = sum(domain_of(one) == session.domain for one in held)
            if number >= owner.spec.max_per_pod:
                raise RejectedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the pod {pod.full_name} has {number} conditions of {session.domain}; "
                    "maxPerPod of its ConditionOwner admits no more",
                )
            record = OwnedCondition("", "", "", sandbox, self._now())
            self._held.setdefault(uid, {})[kind] = record
        record.session, record.gone_since = session.number, None
        record.sandbox = sandbox or record.sandbox
        session.resets.pop((uid, kind), None)
        text = (condition.status, condition.reason, condition.message)
        if record.report(*text, self._now()):
            self.changes[session.domain] += 1
            self._show(uid, kind, record)
            self._on_change()
        return record.sandbox

    def remove(self, session: Session, uid: str, kind: str) -> None:
        """The condition is no more. Raises `RejectedError`."""
        validation.check_type(kind, self._owner_of(session))
        if kind in self._held.get(uid, {}):
            self.changes[session.domain] += 1
            self._remove(uid, kind)
            self._on_change()

    def complete(self, session: Session) -> None:
        """The owner has reported all of its conditions: others that no session has are no more."""
        for uid, kind, record in list(self._records()):
            if domain_of(kind) == session.domain and record.session is None:
                self.remove(session, uid, kind)

    def see_pod(self, uid: str) -> None:
        """The pod, or its sandbox, may have come, changed or gone."""
        if self._pod_of(uid) is None:
            if uid in self._held and self._has_all_pods():
                del self._held[uid]
                self._on_change()
            self._seen_in_api.discard(uid)
            return
        sandbox = self._sandbox_of(uid)
        for kind, record in self._held.get(uid, {}).items():
            if sandbox and record.sandbox and record.sandbox != sandbox:
                log.info(Event.CONDITION_RESET, uid=uid, type=kind)
                record.reset(sandbox, self._now())
                if session := self._sessions.get(record.session or 0):
                    session.resets[uid, kind] = None
                    session.wake.set()
                self._on_change()
            elif sandbox and not record.sandbox:
                record.sandbox = sandbox
                self._on_change()
            self._show(uid, kind, record)

    def see_api(self, pod: ApiPod) -> None:
        """What a previous agent wrote to this pod and did not save is held until its owner comes.
        Before a reboot it was about another sandbox."""
        if pod.uid in self._seen_in_api:
            return
        self._seen_in_api.add(pod.uid)
        for condition in patches.written_for_others(pod):
            if condition.type not in self._held.get(pod.uid, {}):
                self._adopt(pod.uid, condition)

    def is_withdrawn(self, uid: str, kind: str) -> bool:
        """Whether a condition that podgate has written is no owner's any more."""
        has_all = self.owners is not None and uid in self._seen_in_api
        return has_all and kind not in self._held.get(uid, {})

    def numbers(self, domain: str) -> tuple[int, int]:
        """How many conditions of an owner there are, and how many of them are stale."""
        found = [one for _, kind, one in self._records() if domain_of(kind) == domain]
        return len(found), sum(one.stale_status is not None for one in found)

    def content(self) -> SavedConditions:
        """For the state file."""
        saved = [record.saved(uid, kind) for uid, kind, record in self._records()]
        return SavedConditions(boot=self._boot, conditions=saved)

    def restore(self, saved: SavedConditions | None) -> None:
        """What the last agent saved, if the node has not booted since."""
        if saved is None or saved.boot != self._boot:
            return
        left_at = asyncio.get_running_loop().time()
        for one in saved.conditions:
            record = OwnedCondition.restored(one, left_at)
            record.gone_since = record.gone_since or self._now()
            self._held.setdefault(one.uid, {})[one.type] = record
        for uid in list(self._held):
            if self._pod_of(uid):
                self.see_pod(uid)

    def drop_unknown(self) -> None:
        """All pods are known: forget what is of others."""
        for uid in list(self._held):
            self.see_pod(uid)

    def _adopt(self, uid: str, condition: PodCondition) -> None:
        stamp = patches.stamp_of(condition)
        assert stamp is not None  # `written_for_others`
        now = self._now()
        record = OwnedCondition(
            condition.status,
            condition.reason,
            patches.without_stamp(condition),
            stamp.sandbox,
            transition_time(condition) or now,
            left_at=asyncio.get_running_loop().time(),
            gone_since=now,
        )
        if condition.reason == validation.OWNER_GONE:
            # What was reported before is not known.
            record.stale_status = condition.status
        sandbox = self._sandbox_of(uid)
        if stamp.boot != self._boot or (sandbox and stamp.sandbox and stamp.sandbox != sandbox):
            record.reset(sandbox, now)
        self._held.setdefault(uid, {})[condition.type] = record
        self._show(uid, condition.type, record)
        if domain_of(condition.type) not in self._timers:
            self._schedule(domain_of(condition.type))
        self._on_change()

    def _owner_of(self, session: Session) -> ConditionOwner:
        owner = (self.owners or {}).get(session.domain)
        if owner is None:
            raise RejectedError(
                grpc.StatusCode.NOT_FOUND, f"the ConditionOwner {session.domain} was deleted"
            )
        return owner

    def _records(self) -> Iterator[tuple[str, str, OwnedCondition]]:
        for uid, held in self._held.items():
            for kind, record in held.items():
                yield uid, kind, record

    def _show(self, uid: str, kind: str, record: OwnedCondition) -> None:
        if pod := self._pod_of(uid):
            self._conditions.set(pod, kind, *record.shown, since=record.since)

    def _remove(self, uid: str, kind: str) -> None:
        held = self._held.get(uid, {})
        held.pop(kind, None)
        if not held:
            self._held.pop(uid, None)
        self._conditions.remove(uid, kind)
        # The writer removes it from the API, also if nothing had been published of it yet.
        self._conditions.changes.mark(uid)

    def _schedule(self, domain: str) -> None:
        """Have the conditions expire that no session has."""
        if timer := self._timers.pop(domain, None):
            timer.cancel()
        owner = (self.owners or {}).get(domain)
        waiting = [record.left_at for _, _, record in self._absent(domain)]
        if owner and waiting:
            at = min(waiting) + owner.spec.stale_after_seconds
            loop = asyncio.get_running_loop()
            self._timers[domain] = loop.call_at(at, self._expire, owner)

    def _absent(self, domain: str) -> Iterator[tuple[str, str, OwnedCondition]]:
        """Those that no session has, and that are not stale yet."""
        for uid, kind, record in self._records():
            is_absent = record.session is None and record.stale_status is None
            if is_absent and domain_of(kind) == domain:
                yield uid, kind, record

    def _expire(self, owner: ConditionOwner) -> None:
        del self._timers[owner.domain]
        loop, count = asyncio.get_running_loop(), 0
        until = loop.time() - owner.spec.stale_after_seconds
        for uid, kind, record in list(self._absent(owner.domain)):
            # A timer fires up to a tick of the clock early.
            if record.left_at <= until + _TICK_SECONDS:
                record.expire(owner.stale_status(record.status), self._now())
                self._show(uid, kind, record)
                count += 1
        if count:
            log.warning(Event.CONDITION_OWNER_GONE, owner=owner.domain, conditions=count)
        self._schedule(owner.domain)
        self._on_change()

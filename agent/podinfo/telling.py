"""All that is told of the node's pods, as bytes that are made once for all readers."""

import asyncio
import dataclasses
import datetime
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from agent.podinfo import knowing, podinfo_pb2
from agent.podinfo.knowing import Known, Sightings

# One look at a node's pods changes many of them: readers get that as one list.
_SETTLE_SECONDS: Final = 0.005
# Making a pod's bytes takes about 30 us; probes and gates have their turns between.
_PODS_AT_ONCE: Final = 16
# A list is 100 kB on a full node: of a thousand watchers no more than these are served in one go.
_WATCHERS_AT_ONCE: Final = 16
_BETWEEN_SECONDS: Final = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one revision.

    The three responses have the same numbers for the same fields, so that these bytes serve all.
    """

    rev: int
    header: bytes
    by_uid: Mapping[str, bytes]
    """One pod each, as an element of the field `pods`; static pods by both uids."""
    everything: bytes
    """The whole response, header included."""

    def one(self, uid: str) -> bytes | None:
        """The response about one pod; None if it is not known."""
        pod = self.by_uid.get(uid)
        return None if pod is None else self.header + pod


@dataclasses.dataclass(slots=True)
class _Told:
    """One pod as it was told last."""

    sightings: Sightings
    known: Known
    content: bytes = b""
    order: tuple[str, str, str] = ("", "", "")
    mirror_uid: str = ""


class Telling:
    """Keeps the newest snapshot. Whoever knows of changes calls `hint`; that costs nothing."""

    def __init__(
        self,
        everything: Callable[[], Mapping[str, Known]],
        *,
        unready_because: Callable[[], str | None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """everything: all pods of the node by the runtime's uid; unready_because: why these are not
        all yet, in one sentence, else None. It is believed for good when it once was None: what is
        lost later stays known."""
        self.instance_id: Final = secrets.randbits(63) + 1
        self._everything = everything
        self._unready_because = unready_because
        self._now = now
        self._settle_seconds = settle_seconds
        self._snapshot: Snapshot | None = None
        self._told: dict[str, _Told] = {}
        self._hinted = asyncio.Event()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.is_ready: Final = asyncio.Event()

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest one; None until every pod of the node has been looked at."""
        return self._snapshot

    def unready_because(self) -> str:
        """Why there is no snapshot yet, in one sentence."""
        return self._unready_because() or "the first list is being made"

    def hint(self) -> None:
        """Something may have changed."""
        self._hinted.set()

    async def run(self) -> None:
        """Take in what changes, for ever."""
        while True:
            await self._hinted.wait()
            await asyncio.sleep(self._settle_seconds)
            self._hinted.clear()
            if self._snapshot is None and self._unready_because() is not None:
                # What ends this is told by nobody.
                await asyncio.sleep(0.05)
                self._hinted.set()
                continue
            if await self._look():
                await self._wake()

    async def newer(self, than: int) -> Snapshot:
        """The newest snapshot, as soon as its revision is another one. Only once there is one."""
        while True:
            assert self._snapshot is not None  # the caller has looked
            if self._snapshot.rev != than:
                return self._snapshot
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)

    async def _look(self) -> bool:
        """Make another snapshot if anything changed; whether it did."""
        found = dict(self._everything())
        is_changed = self._snapshot is None
        for uid in self._told.keys() - found.keys():
            del self._told[uid]
            is_changed = True
        for number, (uid, known) in enumerate(found.items(), start=1):
            if number % _PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
            told = self._told.get(uid)
            if told is not None and told.known == known:
                continue
            told = told or _Told(Sightings(), known)
            told.known = known
            message = told.sightings.look(known, self._now())
            before = told.content, told.order
            told.content = podinfo_pb2.ListPodConditionsResponse(pods=[message]).SerializeToString()
            told.order = (message.pod_namespace, message.pod_name, message.pod_uid)
            told.mirror_uid = knowing.mirror_uid(known)
            self._told[uid] = told
            is_changed = is_changed or before != (told.content, told.order)
        if is_changed:
            self._snapshot = self._made()
            self.is_ready.set()
        return is_changed

    def _made(self) -> Snapshot:
        rev = self._snapshot.rev + 1 if self._snapshot else 1
        header = podinfo_pb2.ListPodConditionsResponse(
            instance_id=self.instance_id, rev=rev
        ).SerializeToString()
        told = sorted(self._told.values(), key=lambda one: one.order)
        by_uid = {one.mirror_uid: one.content for one in told if one.mirror_uid}
        by_uid |= {uid: one.content for uid, one in self._told.items()}
        everything = b"".join((header, *(one.content for one in told)))
        return Snapshot(rev, header, by_uid, everything)

    async def _wake(self) -> None:
        for number, waiter in enumerate(list(self._waiting), start=1):
            if not waiter.done():
                waiter.set_result(None)
            if number % _WATCHERS_AT_ONCE == 0:
                await asyncio.sleep(_BETWEEN_SECONDS)

"""All that is told of the node's pods, as bytes that are made once for all readers."""

import asyncio
import datetime
import secrets
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from agent.api.podinfo.merge import Known

# One look at a node's pods changes many of them: readers get that as one list.
_SETTLE_SECONDS: Final = 0.005
_UNREADY_SECONDS: Final = 0.05
# Making a pod's bytes takes about 30 us; probes and gates have their turns between.
_PODS_AT_ONCE: Final = 16
# A list is 100 kB on a full node: of a thousand watchers no more than these are served in one go.
_WATCHERS_AT_ONCE: Final = 16
_BETWEEN_SECONDS: Final = 0.001


class Entry(NamedTuple):
    """One pod as it is told. order: where it stands in the list; content: the bytes of a response
    that has nothing but this one pod; uids: all by which it may be asked for."""

    order: tuple[str, str, str]
    content: bytes
    uids: tuple[str, ...]


class Teller(Protocol):
    """Makes entries of one pod, and may remember what it told of it."""

    def tell(self, known: Known, now: datetime.datetime) -> Entry: ...


class Snapshot(NamedTuple):
    """Everything at one revision. Protobuf's messages can be joined as bytes: a response is its
    header and any of these entries."""

    rev: int
    header: bytes
    entries: tuple[Entry, ...]
    by_uid: Mapping[str, Entry]
    everything: bytes
    """The response with all pods."""

    def one(self, uid: str) -> bytes | None:
        """The response with one pod; None if it is not known."""
        entry = self.by_uid.get(uid)
        return None if entry is None else self.header + entry.content


class _Told:
    """One pod as it was told last."""

    __slots__ = ("entry", "known", "teller")

    def __init__(self, teller: Teller) -> None:
        self.teller = teller
        self.known: Known | None = None
        self.entry: Entry | None = None


class Telling:
    """Keeps the newest snapshot. Whoever knows of changes calls `hint`; that costs nothing."""

    def __init__(
        self,
        everything: Callable[[], Mapping[str, Known]],
        *,
        teller: Callable[[], Teller],
        header: Callable[[int, int], bytes],
        unready_because: Callable[[], str | None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """everything: all pods of the node by the runtime's uid; teller: makes one for each pod;
        header: a response without pods, of this instance and revision; unready_because: why these
        are not all pods yet, in one sentence, else None. Once it was None it is not asked again:
        what is lost later stays known."""
        self.instance_id: Final = secrets.randbits(63) + 1
        self.snapshot: Snapshot | None = None
        """The newest one; None until every pod of the node has been looked at."""
        self.is_ready: Final = asyncio.Event()
        self._everything = everything
        self._teller = teller
        self._header = header
        self._unready_because = unready_because
        self._now = now
        self._settle_seconds = settle_seconds
        self._told: dict[str, _Told] = {}
        self._hinted = asyncio.Event()
        self._hinted.set()
        self._waiting: dict[asyncio.Future[None], None] = {}

    @property
    def waiting(self) -> int:
        """How many wait for something newer."""
        return len(self._waiting)

    def unready_because(self) -> str:
        """Why there is no snapshot yet, in one sentence."""
        return self._unready_because() or "the first list is being made"

    def hint(self) -> None:
        """Something may have changed."""
        self._hinted.set()

    async def run(self) -> None:
        """Take in what changes, for ever."""
        while self._unready_because() is not None:  # noqa: ASYNC110  (what ends it is told by nobody)
            await asyncio.sleep(_UNREADY_SECONDS)
        while True:
            await self._hinted.wait()
            await asyncio.sleep(self._settle_seconds)
            self._hinted.clear()
            if await self._look():
                await self._wake()

    async def newer(self, than: int) -> Snapshot:
        """The newest snapshot, as soon as its revision is another one."""
        while self.snapshot is None or self.snapshot.rev == than:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)
        return self.snapshot

    async def _look(self) -> bool:
        """Make another snapshot if anything changed; whether it did."""
        found = self._everything()
        is_changed = self.snapshot is None
        for uid in self._told.keys() - found.keys():
            del self._told[uid]
            is_changed = True
        for number, (uid, known) in enumerate(found.items(), start=1):
            if number % _PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
            told = self._told.setdefault(uid, _Told(self._teller()))
            if told.known == known:
                continue
            told.known = known
            before, told.entry = told.entry, told.teller.tell(known, self._now())
            is_changed = is_changed or told.entry != before
        if is_changed:
            self.snapshot = self._made()
            self.is_ready.set()
        return is_changed

    def _made(self) -> Snapshot:
        rev = self.snapshot.rev + 1 if self.snapshot else 1
        header = self._header(self.instance_id, rev)
        entries = tuple(sorted(told.entry for told in self._told.values() if told.entry))
        by_uid = {uid: entry for entry in entries for uid in entry.uids}
        everything = b"".join((header, *(entry.content for entry in entries)))
        return Snapshot(rev, header, entries, by_uid, everything)

    async def _wake(self) -> None:
        for number, waiter in enumerate(list(self._waiting), start=1):
            if not waiter.done():
                waiter.set_result(None)
            if number % _WATCHERS_AT_ONCE == 0:
                await asyncio.sleep(_BETWEEN_SECONDS)

"""Publishes this node's pods, encoded once and shared by all readers."""

import asyncio
import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Protocol

from agent.api.podinfo.merge import PodRecord
from agent.api.publisher import SnapshotPublisher

# One pass over a node's pods changes many of them: readers get that as one list.
_SETTLE_SECONDS = 0.005
# Encoding a pod takes about 30 us; probes and gates run in between.
_PODS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPod:
    """One pod, encoded. order: sort key in the list; content: the bytes of a response that has
    nothing but this pod; uids: all uids by which clients may request it."""

    order: tuple[str, str, str]
    content: bytes
    uids: tuple[str, ...]


class Encoder(Protocol):
    """Encodes one pod; may keep state of it between calls."""

    def encode(self, record: PodRecord, now: datetime.datetime) -> EncodedPod: ...


@dataclasses.dataclass(frozen=True, slots=True)
class PodsSnapshot:
    """All pods at one revision. Protobuf messages can be joined as bytes: a response is its header
    and any of these pods."""

    rev: int
    header: bytes
    pods: tuple[EncodedPod, ...]
    by_uid: Mapping[str, EncodedPod]
    response: bytes
    """The response with all pods."""

    def response_of(self, uid: str) -> bytes | None:
        """The response with one pod; None if there is no pod of that uid."""
        pod = self.by_uid.get(uid)
        return None if pod is None else self.header + pod.content


@dataclasses.dataclass(slots=True)
class _PublishedPod:
    """One pod as it was encoded last."""

    encoder: Encoder
    record: PodRecord | None = None
    encoded: EncodedPod | None = None


class PodsPublisher(SnapshotPublisher[PodsSnapshot]):
    """Publishes all pods of the node."""

    def __init__(
        self,
        records: Callable[[], Mapping[str, PodRecord]],
        *,
        encoder: Callable[[], Encoder],
        header: Callable[[int, int], bytes],
        synced: asyncio.Event,
        unready_because: Callable[[], str | None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """records: all pods of the node by the runtime's uid; encoder: makes one for each pod;
        header: a response without pods, of this instance and revision; synced: set once the records
        are complete; unready_because: why they are not yet, in one sentence. Pods of a source that
        fails later stay published."""
        super().__init__(settle_seconds=settle_seconds)
        self._records = records
        self._new_encoder = encoder
        self._header = header
        self._synced = synced
        self._unready_because = unready_because
        self._now = now
        self._published: dict[str, _PublishedPod] = {}

    def unready_because(self) -> str:
        """Why there is no snapshot yet, in one sentence."""
        return self._unready_because() or "the first list is being encoded"

    async def run(self) -> None:
        """Publish until cancelled."""
        await self._synced.wait()
        self.complete()
        await super().run()

    async def _refresh(self) -> bool:
        records = self._records()
        is_changed = False
        for uid in self._published.keys() - records.keys():
            del self._published[uid]
            is_changed = True
        for number, (uid, record) in enumerate(records.items(), start=1):
            if number % _PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
            pod = self._published.setdefault(uid, _PublishedPod(self._new_encoder()))
            if pod.record == record:
                continue
            pod.record = record
            before, pod.encoded = pod.encoded, pod.encoder.encode(record, self._now())
            is_changed = is_changed or pod.encoded != before
        return is_changed

    def _build(self) -> PodsSnapshot:
        header = self._header(self.instance_id, self.rev)
        encoded = (pod.encoded for pod in self._published.values() if pod.encoded)
        pods = tuple(sorted(encoded, key=lambda pod: pod.order))
        by_uid = {uid: pod for pod in pods for uid in pod.uids}
        response = b"".join((header, *(pod.content for pod in pods)))
        return PodsSnapshot(self.rev, header, pods, by_uid, response)

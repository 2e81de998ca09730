"""Publishes the conditions of this node's pods, encoded once and shared by all readers.

A change costs as much as the pods that changed: only these are read again. They are encoded, and a
list is joined, when the first client requests them.
"""

import asyncio
import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping

from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.observed_pods import ObservedPod, PodObserver
from agent.api.podinfo.records import PodRecords
from agent.api.publisher import SnapshotPublisher

# One pass over a node's pods changes many of them: readers get that as one list.
_SETTLE_SECONDS = 0.005
# While a crowd of pods starts, each of them changes some ten times: fewer revisions have it all.
_SHARE = 0.05
# Reading a pod takes about 30 us; probes and gates run in between.
_PODS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class PodsSnapshot:
    """All pods at one revision. Protobuf messages can be joined as bytes: a response is its header
    and any of these pods."""

    instance_id: int
    rev: int
    pods: tuple[ObservedPod, ...]

    @functools.cached_property
    def header(self) -> bytes:
        from agent.api.podinfo import pod_messages

        return pod_messages.header(self.instance_id, self.rev)

    @functools.cached_property
    def response(self) -> bytes:
        """The response with all pods, by namespace and name."""
        pods = sorted(self.pods, key=lambda pod: pod.order)
        return b"".join((self.header, *(pod.content for pod in pods)))

    def response_of(self, uid: str) -> bytes | None:
        """The response with one pod; None if there is no pod of that uid."""
        pod = self._by_uid.get(uid)
        return None if pod is None else self.header + pod.content

    @functools.cached_property
    def _by_uid(self) -> Mapping[str, ObservedPod]:
        return {uid: pod for pod in self.pods for uid in pod.uids}


@dataclasses.dataclass(slots=True)
class _PublishedPod:
    """One pod as it was observed last."""

    observer: PodObserver
    record: PodRecord | None = None
    observed: ObservedPod | None = None


class PodsPublisher(SnapshotPublisher[PodsSnapshot]):
    """Publishes all pods of the node."""

    def __init__(
        self,
        records: PodRecords,
        *,
        synced: asyncio.Event,
        unready_because: Callable[[], str | None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """synced: set once the records are complete; unready_because: why they are not yet, in one
        sentence. Pods of a source that fails later stay published."""
        super().__init__(settle_seconds=settle_seconds, largest_share=_SHARE)
        self._records = records
        self._synced = synced
        self._unready_because = unready_because
        self._now = now
        self._changed: dict[str, None] = {}
        self._published: dict[str, _PublishedPod] = {}

    def unready_because(self) -> str:
        """Why there is no snapshot yet, in one sentence."""
        return self._unready_because() or "the first list is being encoded"

    def hint_pod(self, uid: str) -> None:
        """This pod may have come, changed or gone."""
        self._changed[uid] = None
        self.hint()

    async def run(self) -> None:
        """Publish until cancelled."""
        await self._synced.wait()
        self._changed.update(dict.fromkeys(self._records.uids()))
        self.complete()
        await super().run()

    async def _refresh(self) -> bool:
        changed, self._changed = self._changed, {}
        is_changed = False
        for number, uid in enumerate(changed, start=1):
            if number % _PODS_AT_ONCE == 0:
                await asyncio.sleep(0)
            is_changed = self._refresh_pod(uid) or is_changed
        return is_changed

    def _refresh_pod(self, uid: str) -> bool:
        """Whether what clients get of the pod has changed."""
        record = self._records.of(uid)
        if record is None:
            return self._published.pop(uid, None) is not None
        pod = self._published.setdefault(uid, _PublishedPod(PodObserver()))
        if pod.record == record:
            return False
        pod.record = record
        before, observed = pod.observed, pod.observer.observe(record, self._now())
        if observed == before:
            return False
        pod.observed = observed
        return True

    def _build(self) -> PodsSnapshot:
        observed = (pod.observed for pod in self._published.values())
        pods = tuple(pod for pod in observed if pod)
        return PodsSnapshot(self.instance_id, self.rev, pods)

"""Drops as Events of the pod, for its owner: source, port, mode, and a policy that would admit it.

An Event is for one source, port and mode of a pod, and exists for an hour. In audit a whole fleet
may have sources on every node, so each node has a small budget; `podgate drops` has all of them.
"""

import asyncio
import collections
import datetime
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from agent import backoff
from agent.admin.observations import ObservedFlows
from agent.drops.merging import observed_pod
from agent.drops.source_processes import CgroupName, SourceProcesses, protocol_word, wall_clock
from agent.drops.source_report import SCANNED_PORTS
from agent.labels import TRAFFIC_DROPPED, TRAFFIC_WOULD_DROP
from agent.operate import flow_text
from agent.pods.events import PodEvent, PodEvents
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.policy import suggestions
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode

# A full aggregate takes a tenth of a second to read, which once a minute is 0.2 % of a CPU.
_PERIOD_SECONDS = 60.0
# The API server deletes an Event after an hour (--event-ttl): one that continues is always there.
_AGAIN_SECONDS = 1800.0
# Of 5,000 nodes that all drop without end, 100 requests a second.
_PER_SECOND, _BURST = 0.02, 30
_MAX_ANNOUNCED = 20_000
# An Event's note has 1024 bytes (pkg/apis/core/validation/events.go); a policy that is cut is none.
_MAX_NOTE = 1000

_Key = tuple[int, int, int, int, bool, Mode]
_Seen = tuple[DropSource, CgroupName]


class DropNotices:
    """Records an Event for each source whose flows to a pod are dropped, or would be."""

    def __init__(
        self,
        processes: SourceProcesses,
        events: PodEvents,
        *,
        store: PodStore,
        labels: ObjectLabels,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._events = events
        self._store = store
        self._labels = labels
        self._now = now
        self._counts: dict[_Key, int] | None = None
        """Packets by source, as last read. None before: those were of a previous agent."""
        self._announced: dict[tuple[str, str], float] = {}
        """By uid and what the Event is about, when it was last recorded."""
        self._bucket = backoff.Bucket(per_second=_PER_SECOND, burst=_BURST)

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            self.record(await asyncio.to_thread(self._processes.read))
            await asyncio.sleep(_PERIOD_SECONDS)

    def record(self, seen: Sequence[_Seen]) -> None:
        """Record what has grown since the last time, dropped traffic before that of audit."""
        before, counts = self._counts, {_key(one): one.count for one, _ in seen}
        self._counts = counts
        if before is None:
            return
        grown = [found for found in seen if found[0].count > before.get(_key(found[0]), 0)]
        for group in sorted(_groups(grown), key=lambda group: group[0][0].mode is Mode.AUDIT):
            self._announce(group)
        self._forget()

    def _announce(self, group: Sequence[_Seen]) -> None:
        """group: one source and port, or the ports of a scan."""
        first, cgroup = group[0]
        pod = self._store.pod_of_interface(first.ifindex)
        if pod is None:
            return
        flow = self._flow(first, cgroup, pod, is_scan=len(group) > 1)
        is_audit = first.mode is Mode.AUDIT
        reason = TRAFFIC_WOULD_DROP if is_audit else TRAFFIC_DROPPED
        about = f"{reason} {first.mode.label} {_target(flow)} {cgroup.path}"
        announced = self._announced.get((pod.uid, about))
        if announced is not None and self._now() - announced < _AGAIN_SECONDS:
            return
        if self._bucket.seconds_until_next() > 0:
            return
        self._bucket.take()
        self._announced[pod.uid, about] = self._now()
        packets = sum(one.count for one, _ in group)
        note = _note(flow, first.mode, packets)
        self._events.record(PodEvent(pod.uid, reason, note, action="Gating", about=about))

    def _flow(
        self, seen: DropSource, cgroup: CgroupName, pod: Pod, *, is_scan: bool
    ) -> ObservedFlows:
        return ObservedFlows(
            pod=observed_pod(pod, self._labels.snapshot()),
            protocol=seen.protocol,
            port=0 if is_scan else seen.port,
            cgroup=cgroup.path,
            packets=seen.count,
            first=wall_clock(seen.first_ns),
            last=wall_clock(seen.last_ns),
            process=seen.process_name,
            has_many_ports=is_scan or seen.has_many_ports,
            source_pod=cgroup.pod,
        )

    def _forget(self) -> None:
        if len(self._announced) > _MAX_ANNOUNCED:
            limit = self._now() - _AGAIN_SECONDS
            self._announced = {key: at for key, at in self._announced.items() if at > limit}


def _groups(seen: Iterable[_Seen]) -> list[list[_Seen]]:
    """Each source and port is one; the ports of a pod that one source scans are one, too."""
    by_source: dict[tuple[object, ...], list[_Seen]] = collections.defaultdict(list)
    for found in seen:
        one = found[0]
        by_source[one.ifindex, one.cgroup, one.protocol, one.mode].append(found)
    groups: list[list[_Seen]] = []
    for each in by_source.values():
        groups += [each] if len(each) >= SCANNED_PORTS else [[found] for found in each]
    return groups


def _key(seen: DropSource) -> _Key:
    return (
        *(seen.ifindex, seen.cgroup, seen.protocol, seen.port),
        seen.has_many_ports,
        seen.mode,
    )


def _target(flow: ObservedFlows) -> str:
    word = protocol_word(flow.protocol)
    return flow_text.target_text(word, flow.port, has_many_ports=flow.has_many_ports)


def _note(flow: ObservedFlows, mode: Mode, packets: int) -> str:
    pod = f"{flow.source_pod.namespace}/{flow.source_pod.name}" if flow.source_pod else ""
    source = flow_text.in_text(flow.process, flow_text.source_text(flow.cgroup, pod))
    did = "would drop in enforce" if mode is Mode.AUDIT else "dropped"
    what = "packet" if packets == 1 else "packets"
    text = f"Mode {mode.label}: {did} {packets} {what} from {source} to {_target(flow)}."
    found = next(iter(suggestions.suggest([flow], datetime.timedelta())), None)
    if found is None or found.policy is None:
        return text
    spec = msgspec.json.encode(found.policy.spec).decode()
    doubt = f" (check first: {found.doubt})" if found.doubt else ""
    policy = f"{text} A HostAccessPolicy that admits it{doubt} has the spec {spec}"
    return policy if len(policy.encode()) <= _MAX_NOTE else text

"""History of observed flows: the kernel's aggregate, with what it loses when a pod ends, a table is
full, or the node reboots."""

import asyncio
import collections
import contextlib
import datetime
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from agent import state_files
from agent.admin.observations import Observations, ObservedFlows, ObservedPod
from agent.drops.merging import (
    FlowKey,
    flow_key,
    merge,
    merged,
    observed_pod,
    source_key,
)
from agent.drops.source_processes import SourceProcesses, wall_clock
from agent.linux.procfs import boot_id
from agent.logs import Event
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf import abi
from bpf.drop_sources import DropSource, DropSources
from bpf.verdicts import Mode

FLOWS_FILE = "observed_flows.json"
"""In the directory of saved state."""

# A full aggregate takes a tenth of a second to read, which once a minute is 0.2 % of a CPU; a
# source that a full table forgets within a minute is lost.
_PERIOD_SECONDS = 60.0
# Flows of pods that are gone: 10 MB of state, and twenty times as many as a large node needs.
_MAX_ENDED = 20_000
# Gates change with an event; this is for one that is missing.
_GATES_SECONDS = 30.0
# Until every pod has been reconciled, which ends without one.
_UNSYNCED_SECONDS = 2.0
# Between changes that are saved: the whole history is written, while hundreds of pods may start.
_SETTLE_SECONDS = 5.0

_RawKey = tuple[int, int, int, int, Mode]


Observer = Callable[[Collection[DropSource], Mapping[int, ObservedPod]], None]
"""Of all sources, and of the pods by ifindex. Called in threads, in one at a time."""


class _SavedHistory(msgspec.Struct, kw_only=True, rename="camel"):
    """alive_until: when it was saved; pods: of gated interfaces, by ifindex, valid for one boot."""

    boot: str
    since: datetime.datetime
    alive_until: datetime.datetime
    unobserved_seconds: float
    pods: dict[int, ObservedPod]
    ended: list[ObservedFlows]
    lost: int = 0


class _SavedPods(msgspec.Struct):
    """Of the same file, what the commands read."""

    boot: str
    pods: dict[int, ObservedPod]


def saved_pods(path: pathlib.Path) -> dict[int, ObservedPod]:
    """The pods of gated interfaces by ifindex, as an agent saved them since the last boot.

    Empty if there is no such file. Blocks.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        saved = msgspec.json.decode(path.read_bytes(), type=_SavedPods)
        if saved.boot == boot_id():
            return saved.pods
    return {}


class SourceHistory:
    """All flows since the first start, bounded.

    The aggregate is keyed by interface, and its entries are deleted with the gate: before that they
    are added to the history. So the pods of interfaces are saved as well: a pod may end while no
    agent runs.
    """

    def __init__(
        self,
        drop_sources: DropSources,
        processes: SourceProcesses,
        *,
        state: pathlib.Path,
        store: PodStore,
        labels: ObjectLabels,
        clock: Callable[[int], datetime.datetime] = wall_clock,
    ) -> None:
        """processes: has names of cgroups; state: the file; labels: of namespaces; clock: times of
        CLOCK_MONOTONIC."""
        self._drop_sources = drop_sources
        self._processes = processes
        self._state = state
        self._store = store
        self._labels = labels
        self._clock = clock
        self._changes = store.in_force.subscribe()
        self._changed_labels = labels.changes.subscribe()
        self._observed: dict[str, tuple[Pod, ObservedPod]] = {}
        """By uid, what was made of a pod: it is the same until the pod or its labels change."""
        self._since = self._now()
        self._unobserved_seconds = 0.0
        self._pods: dict[int, ObservedPod] = {}
        self._live: dict[_RawKey, DropSource] = {}
        """Entries of the aggregate as they were last read."""
        self._ended: dict[FlowKey, ObservedFlows] = {}
        self._shares: collections.Counter[FlowKey] = collections.Counter()
        self._lost = 0
        self._unknown: set[int] = set()
        """Interfaces of the aggregate without a pod, when it was last read."""
        self._lock = threading.Lock()
        self.observer: Observer | None = None
        """Gets each reading of the aggregate: the last one of an interface before its entries are
        deleted, too."""

    def _restore(self) -> None:
        """Read what the previous run saved."""
        saved = state_files.read(self._state, _SavedHistory, failure=Event.HISTORY_UNREADABLE)
        if saved is None:
            return
        self._since = min(saved.since, self._since)
        gap_seconds = (self._now() - saved.alive_until).total_seconds()
        self._unobserved_seconds = saved.unobserved_seconds + max(0.0, gap_seconds)
        self._lost = saved.lost
        self._add(saved.ended)
        if saved.boot == boot_id():
            self._pods = saved.pods

    async def run(self) -> None:
        """Follow gates and the aggregate until cancelled."""
        await asyncio.to_thread(self._restore)
        read_at = changed_at = float("-inf")
        has_new = False
        changed: Iterable[str] | None = None
        while True:
            # Here and not in the thread: the state of a pod that ended is gone in a moment.
            pods = self._gated_pods(changed)
            has_new |= any(self._pods.get(ifindex) != pod for ifindex, pod in pods.items())
            self._pods = self._pods | pods
            removed = self._store.removed.values()
            gated = self._store.gated_interfaces() | {i for one in removed for i in one.gates}
            ended = self._pods.keys() - gated if self._store.is_synced else set()
            now = asyncio.get_running_loop().time()
            if now - read_at >= _PERIOD_SECONDS:
                read_at = now
                await asyncio.to_thread(self._look, gated if self._store.is_synced else None)
            if (ended or has_new) and now - changed_at >= _SETTLE_SECONDS:
                changed_at = now
                has_new = False
                save = functools.partial(self._end, ended) if ended else self._save
                await asyncio.to_thread(save)
            is_settling = bool(ended) or has_new
            wait_until = now + _GATES_SECONDS
            if is_settling:
                wait_until = changed_at + _SETTLE_SECONDS
            elif not self._store.is_synced:
                wait_until = now + _UNSYNCED_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(wait_until):
                    await self._changes.wait()
            changed = self._changes.take() or None

    def refresh(self) -> None:
        """Read the aggregate. Blocks for some milliseconds."""
        with self._lock:
            self._refresh()

    def observations(self) -> Observations:
        """All flows, merged; without what others know. Blocks for some milliseconds."""
        with self._lock:
            self._refresh()
            flows = merge([*self._ended.values(), *self._flows(self._live.values())])
            lost = self._lost + self._drop_sources.lost()
        return Observations(
            since=self._since,
            until=self._now(),
            node_labels=dict(self._labels.snapshot().node),
            unobserved_seconds=self._unobserved_seconds,
            flows=sorted(flows, key=lambda one: -one.packets),
            lost=lost,
        )

    def _gated_pods(self, changed: Iterable[str] | None = None) -> dict[int, ObservedPod]:
        """By ifindex; of pods that are gone, too, while they have gates that no running pod has.
        changed: of these pods, unless labels changed; None: of all."""
        states = self._store.removed | self._store.pods
        gated = self._store.gated_interfaces()
        if self._changed_labels.take():
            self._observed.clear()
            changed = None
        if changed is None:
            self._observed = {uid: one for uid, one in self._observed.items() if uid in states}
        labels = self._labels.snapshot()
        found: dict[int, ObservedPod] = {}
        for uid in states if changed is None else [uid for uid in changed if uid in states]:
            state = states[uid]
            kept = self._observed.get(uid)
            if kept is None or kept[0] is not state.pod:
                kept = self._observed[uid] = state.pod, observed_pod(state.pod, labels)
            gates = state.gates if uid in self._store.pods else state.gates.keys() - gated
            found |= dict.fromkeys(gates, kept[1])
        return found

    def _look(self, gated: set[int] | None) -> None:
        """Read the aggregate, and save. gated: None until every pod has been reconciled; later
        entries of interfaces that twice have neither gate nor pod are deleted: an entry may be
        newer than the record of its pod."""
        with self._lock:
            self._refresh()
            if gated is not None:
                interfaces = {seen.ifindex for seen in self._live.values()}
                unknown = interfaces - gated - self._pods.keys()
                self._forget(unknown & self._unknown)
                self._unknown = unknown
        self._save()

    def _end(self, ended: set[int]) -> None:
        """Add the flows of these interfaces to the history, and delete them from the aggregate."""
        with self._lock:
            self._refresh()
            self._add(self._flows(seen for seen in self._live.values() if seen.ifindex in ended))
            self._pods = {i: pod for i, pod in self._pods.items() if i not in ended}
        # First, so that a kill in between loses nothing.
        self._save()
        with self._lock:
            self._forget(ended)

    def _refresh(self) -> None:
        """Read the aggregate; what it has forgotten since is added to the history."""
        live = {_raw_key(seen): seen for seen in self._drop_sources.read()}
        self._processes.learn({seen.cgroup for seen in live.values()})
        forgotten = [
            seen
            for key, seen in self._live.items()
            if key not in live or live[key].first_ns != seen.first_ns
        ]
        self._add(self._flows(forgotten))
        self._live = live
        if self.observer:
            self.observer(live.values(), self._pods)

    def _forget(self, interfaces: Collection[int]) -> None:
        if interfaces:
            self._drop_sources.forget(*interfaces)
            self._live = {k: seen for k, seen in self._live.items() if k[1] not in interfaces}

    def _flows(self, found: Iterable[DropSource]) -> Iterator[ObservedFlows]:
        for seen in found:
            if pod := self._pods.get(seen.ifindex):
                name = self._processes.source(seen.cgroup)
                yield ObservedFlows(
                    pod=pod,
                    protocol=seen.protocol,
                    port=seen.port,
                    has_many_ports=seen.has_many_ports,
                    cgroup=name.path,
                    source_pod=name.pod,
                    process=seen.process_name,
                    packets=seen.count,
                    first=self._clock(seen.first_ns),
                    last=self._clock(seen.last_ns),
                )

    def _add(self, flows: Iterable[ObservedFlows]) -> None:
        for one in flows:
            key, source = flow_key(one), source_key(one)
            if before := self._ended.get(key):
                self._ended[key] = merged(before, one)
            elif len(self._ended) >= _MAX_ENDED or self._shares[source] >= abi.CGROUP_SOURCES:
                self._lost += one.packets
            else:
                self._ended[key] = one
                self._shares[source] += 1

    def _save(self) -> None:
        with self._lock:
            content = msgspec.json.encode(
                _SavedHistory(
                    boot=boot_id(),
                    since=self._since,
                    alive_until=self._now(),
                    unobserved_seconds=self._unobserved_seconds,
                    pods=self._pods,
                    ended=list(self._ended.values()),
                    lost=self._lost,
                )
            )
            state_files.write(self._state, content, failure=Event.HISTORY_NOT_SAVED)

    def _now(self) -> datetime.datetime:
        return self._clock(time.monotonic_ns())


def _raw_key(seen: DropSource) -> _RawKey:
    return seen.cgroup, seen.ifindex, seen.protocol, seen.port, seen.mode

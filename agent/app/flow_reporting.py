"""Records of flows: what the kernel counts, compared with what it counted before, to an output."""

import asyncio
import collections
import datetime
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from agent import VERSION, backoff, tasks
from agent.admin.observations import ObservedPod
from agent.drops.events import DropEventLog
from agent.drops.history import SourceHistory
from agent.drops.source_processes import SourceProcesses, wall_clock
from agent.flows.file import FlowFile
from agent.flows.outlet import Outlet, Output
from agent.flows.records import (
    AdmissionRecord,
    DestinationRecord,
    DropRecord,
    FlowRecord,
    Record,
    SourceRecord,
    StartRecord,
)
from agent.flows.stdout import StandardOutput
from agent.flows.tally import Fresh, Tally
from agent.pods.pod import Pod
from agent.policy.rules_report import RuleSample
from agent.settings import FlowFileSettings, FlowOtlpSettings, FlowSettings
from bpf.counters import Counts
from bpf.drop_events import DropEvent
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode, Verdict

# At the end, for what is queued. Another agent may wait for the node.
_CLOSE_SECONDS = 1.0
# A full table may cost one hundredth of a CPU, however short the interval is.
_REST_PER_READ = 100
_UNKNOWN = DestinationRecord(namespace="", pod="")

_Rule = tuple[str, str, str, str]
"""Policy, source, protocol and ports."""


class FlowReporting:
    """All of it. From the first reading on: what was counted before has no record."""

    def __init__(
        self,
        settings: FlowSettings,
        *,
        node: str,
        counts: Callable[[], Mapping[int, Counts]],
        history: SourceHistory,
        events: DropEventLog,
        processes: SourceProcesses,
        admissions: Callable[[], Awaitable[Sequence[RuleSample]]],
    ) -> None:
        """node: its name, empty without a cluster; counts: of all gates, blocks; history, events:
        which get an observer; processes: has the names of cgroups; admissions: hits of all
        rules."""
        self._interval_seconds = settings.interval_seconds
        self._read_seconds = 0.0
        self._node = node
        self._counts = counts
        self._processes = processes
        self._history = history
        self._history.observer = self._observe
        self._admissions = admissions
        output, name = _output(settings, node)
        self.outlet = Outlet(output, name=name, node=node)
        if rate := settings.drops_per_second:
            self._drop_budget = backoff.Bucket(per_second=rate, burst=rate)
            events.observer = self._observe_drops
        self._tally = Tally()
        self._pods: dict[int, ObservedPod] = {}
        """By ifindex, also of pods that ended since the last records."""
        self._lost_drops = 0
        """Single drops beyond the limits, since the last records."""
        self._lock = threading.Lock()
        """Of the three above: others read the history, too."""
        self._hits: collections.Counter[_Rule] | None = None

    async def run(self) -> None:
        """Send records every few seconds until cancelled, and then once more."""
        self.outlet.start()
        try:
            if not self._tally.has_begun:
                await asyncio.to_thread(self._begin)
                await self._admitted()
            while True:
                await tasks.tick(max(self._interval_seconds, self._read_seconds * _REST_PER_READ))
                # Raises if its thread has ended.
                self.outlet.start()
                await self._report()
        except asyncio.CancelledError:
            if self._tally.has_begun:
                await self._report()
            await tasks.close_in_thread(functools.partial(self.outlet.close, _CLOSE_SECONDS))
            raise

    def _begin(self) -> None:
        self._history.refresh()
        counts = self._counts()
        with self._lock:
            self._tally.begin(counts)
        self.outlet.put([StartRecord(time=_now(), node=self._node, version=VERSION)])

    async def _report(self) -> None:
        admissions = await self._admitted()
        await asyncio.to_thread(self._send, admissions)

    def _send(self, admissions: Sequence[Record]) -> None:
        started = time.monotonic()
        counts = self._counts()
        self._history.refresh()
        self._read_seconds = time.monotonic() - started
        with self._lock:
            self._tally.account(counts)
            fresh, lost = self._tally.take()
            pods, self._pods = self._pods, {}
            lost_drops, self._lost_drops = self._lost_drops, 0
        if lost:
            self.outlet.lose_packets(lost)
        if lost_drops:
            self.outlet.lose_samples(lost_drops)
        # Together: times of one record are in order.
        now, now_ns = _now(), time.monotonic_ns()
        flows = [self._flow(one, pods, now=now, now_ns=now_ns) for one in fresh]
        self.outlet.put([*flows, *admissions])

    def _observe(self, sources: Collection[DropSource], pods: Mapping[int, ObservedPod]) -> None:
        with self._lock:
            self._tally.observe(sources)
            self._pods |= pods

    def _observe_drops(
        self, events: Sequence[tuple[DropEvent, Pod | None]], suppressed: int
    ) -> None:
        records = []
        for event, pod in events:
            if self._drop_budget.seconds_until_next() > 0:
                suppressed += 1
            else:
                self._drop_budget.take()
                records.append(self._drop(event, pod))
        with self._lock:
            self._lost_drops += suppressed
        self.outlet.put(records)

    def _drop(self, event: DropEvent, pod: Pod | None) -> DropRecord:
        source = self._processes.source(event.cgroup)
        return DropRecord(
            time=wall_clock(event.at_ns),
            node=self._node,
            verdict="AUDIT" if event.verdict is Verdict.WOULD_DROP else "DROPPED",
            reason=event.reason.label,
            source=SourceRecord(
                cgroup=source.path, process=event.process_name, pod=source.pod_name
            ),
            destination=DestinationRecord(namespace=pod.namespace, pod=pod.name)
            if pod
            else _UNKNOWN,
            protocol=event.protocol,
            source_address=str(event.source or ""),
            source_port=event.source_port,
            destination_address=str(event.destination or ""),
            destination_port=event.destination_port,
            pid=event.pid,
        )

    def _flow(
        self,
        fresh: Fresh,
        pods: Mapping[int, ObservedPod],
        *,
        now: datetime.datetime,
        now_ns: int,
    ) -> FlowRecord:
        """now_ns: the same instant of CLOCK_MONOTONIC."""
        seen = fresh.source
        source = self._processes.source(seen.cgroup)
        pod = pods.get(seen.ifindex)
        return FlowRecord(
            time=now,
            node=self._node,
            verdict="AUDIT" if seen.mode is Mode.AUDIT else "DROPPED",
            source=SourceRecord(cgroup=source.path, process=seen.process_name, pod=source.pod_name),
            destination=DestinationRecord(namespace=pod.namespace, pod=pod.name)
            if pod
            else _UNKNOWN,
            protocol=seen.protocol,
            port=seen.port,
            has_many_ports=seen.has_many_ports,
            mode=seen.mode.label,
            packets=fresh.packets,
            first=now - _age(fresh.first_ns, now_ns),
            last=now - _age(seen.last_ns, now_ns),
        )

    async def _admitted(self) -> list[Record]:
        """What rules admitted since the last call; nothing at the first one."""
        hits = collections.Counter[_Rule]()
        for one in await self._admissions():
            hits[one.policy, one.source, one.protocol, one.ports] += one.hits
        before, self._hits = self._hits, hits
        if before is None:
            return []
        return [
            AdmissionRecord(
                time=_now(),
                node=self._node,
                policy=policy,
                source=source,
                protocol=protocol,
                ports=ports,
                # The counter of a rule that was removed in between starts again.
                flows=flows - before[rule] if flows >= before[rule] else flows,
            )
            for rule, flows in hits.items()
            if flows and flows != before[rule]
            for policy, source, protocol, ports in [rule]
        ]


def _output(settings: FlowSettings, node: str) -> tuple[Output, str]:
    """The output, and its name for people."""
    match settings.output:
        case FlowFileSettings() as of_file:
            file = FlowFile(of_file.path, max_bytes=of_file.max_bytes, files=of_file.files)
            return file, str(of_file.path)
        case FlowOtlpSettings() as of_receiver:
            return LazyOtlpOutput(of_receiver, node), of_receiver.url
    return StandardOutput(), "standard output"


class LazyOtlpOutput:
    """Imports what it needs in the thread that sends first: that takes 25 ms of CPU."""

    def __init__(self, settings: FlowOtlpSettings, node: str) -> None:
        self._settings = settings
        self._node = node
        self._output: Output | None = None

    def send(self, records: Sequence[Record]) -> None:
        if self._output is None:
            from agent.flows.otlp import OtlpOutput

            self._output = OtlpOutput(
                self._settings.url,
                node=self._node,
                version=VERSION,
                headers=self._settings.headers,
                authority=self._settings.authority,
            )
        self._output.send(records)

    def close(self) -> None:
        if self._output:
            self._output.close()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _age(at_ns: int, now_ns: int) -> datetime.timedelta:
    return datetime.timedelta(seconds=(now_ns - at_ns) / 1e9)

"""What the agent reports about dropped traffic: sources, their history, raw sockets and events."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import registry

from agent.admin.report import Drops
from agent.drops.admitted_sources import AdmittedSources
from agent.drops.events import DropEventLog
from agent.drops.history import FLOWS_FILE, SourceHistory
from agent.drops.raw_sockets import RawSocketSources
from agent.drops.source_processes import NAMES_FILE, CgroupName, SourceProcesses
from agent.drops.source_report import source_status, with_scans
from agent.gates.worker import GateWorker
from agent.pods.object_labels import ObjectLabels
from agent.pods.store import PodStore
from agent.settings import Settings
from bpf.drop_sources import DropSource, DropSources


class DropReporting:
    """Its parts; each reads the maps of `gate_worker`."""

    def __init__(
        self, settings: Settings, gate_worker: GateWorker, *, store: PodStore, labels: ObjectLabels
    ) -> None:
        """labels: of the objects that flows are reported with."""
        self._loaded = gate_worker.loaded
        self._store = store
        state = settings.run_directory / "state"
        sources = DropSources(gate_worker.loaded)
        self.source_processes = SourceProcesses(
            sources, state=state / NAMES_FILE, store=store, labels=labels
        )
        self.history = SourceHistory(
            sources, self.source_processes, state=state / FLOWS_FILE, store=store, labels=labels
        )
        self.raw_sockets = RawSocketSources(
            gate_worker.raw_socket_policy,
            settings.raw_sockets,
            gate_worker.config,
            self.source_processes,
        )
        self.events = DropEventLog(gate_worker.events, sources=self.source_processes, store=store)

    async def report(self) -> Drops:
        seen, admitted = await asyncio.to_thread(self._read)
        raw_sockets = await self.raw_sockets.report()
        return Drops(
            sources=with_scans(
                source_status(
                    *(one, cgroup),
                    namespace=pod.namespace,
                    pod=pod.name,
                    labels=pod.labels,
                    is_admitted=is_admitted,
                )
                for (one, cgroup), is_admitted in zip(seen, admitted, strict=True)
                if (pod := self._store.pod_of_interface(one.ifindex))
            ),
            lost_packets=self.source_processes.lost(),
            raw_sockets=raw_sockets.sources,
        )

    def _read(self) -> tuple[list[tuple[DropSource, CgroupName]], list[bool]]:
        """The sources, and whether rules admit each by now. Blocks for some milliseconds."""
        admitted = AdmittedSources(self._loaded)
        seen = self.source_processes.read()
        return seen, [admitted.has(one, cgroup.path) for one, cgroup in seen]

    @property
    def collectors(self) -> tuple[registry.Collector, ...]:
        return self.events, self.raw_sockets

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "source-processes", self.source_processes.run
        yield "source-history", self.history.run
        yield "raw-sockets", self.raw_sockets.run
        yield "drop-events", self.events.run

"""What the agent reports about dropped traffic: sources, their history, raw sockets and events."""

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import registry

from agent.drops.events import DropEventLog
from agent.drops.history import FLOWS_FILE, SourceHistory
from agent.drops.raw_sockets import RawSocketSources
from agent.drops.source_processes import NAMES_FILE, SourceProcesses
from agent.gates.worker import GateWorker
from agent.pods.object_labels import ObjectLabels
from agent.pods.store import PodStore
from agent.settings import Settings
from bpf.drop_sources import DropSources


class DropReporting:
    """Its parts; each reads the maps of `gate_worker`."""

    def __init__(
        self, settings: Settings, gate_worker: GateWorker, *, store: PodStore, labels: ObjectLabels
    ) -> None:
        """labels: of the objects that flows are reported with."""
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

    @property
    def collectors(self) -> tuple[registry.Collector, ...]:
        return self.events, self.raw_sockets

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "source-processes", self.source_processes.run
        yield "source-history", self.history.run
        yield "raw-sockets", self.raw_sockets.run
        yield "drop-events", self.events.run

"""Service endpoints as a part of a process: a source of objects, local readiness, the publisher and
its servers, and the saved state."""

import asyncio
import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Mapping

import structlog

from agent import tasks
from agent.admin.report import SourceProblem
from agent.api import listen
from agent.api.tls import CurrentTls
from agent.kube.pod_reports import PodReports
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.services.api import saved
from agent.services.api.local_readiness import LocalReadiness
from agent.services.api.node_zones import NodeZones
from agent.services.api.nodes_server import NodesServer
from agent.services.api.object_source import (
    API_SERVER,
    ObjectSource,
    OnService,
    OnSlice,
    SourcePosition,
)
from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.publisher import ServicePublisher
from agent.services.api.saved import SavedServices
from agent.services.api.server import ServicesServer
from agent.services.api.store import ServiceStore
from agent.services.api.view import SavedRevision
from agent.settings import localnet_socket
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

SourceFactory = Callable[[OnService, OnSlice], ObjectSource]
"""Makes the source that reports to these functions."""

# What is newer than the file is unknown to an agent that starts after a kill, until the API server
# responds. Some endpoint of a big cluster changes all the time, and its file has megabytes.
_SAVE_SECONDS, _SAVED_BYTES_PER_SECOND = 0.5, 1 << 20
# A node gets its zone once, soon after it joins; and whether a source has a saved state.
_FOLLOW_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class NodesEndpoint:
    """Where other nodes are served. address: host and port."""

    address: tuple[str, int]
    tls: CurrentTls


class ServiceEndpoints:
    """Which endpoints of each service a node uses, from a source to the sockets."""

    def __init__(
        self,
        make_source: SourceFactory,
        *,
        node: str,
        zones: NodeZones,
        run_directory: pathlib.Path,
        address: tuple[str, int] | None = None,
        state: pathlib.Path | None = None,
        others: NodesEndpoint | None = None,
        saved_pods: StateSaver | None = None,
    ) -> None:
        """zones: run by the caller; address: of the loopback, to serve there as well; state: the
        file of the saved state, in the run directory by default; others: to serve other nodes;
        saved_pods: saves what `set_pod` gets."""
        self._node = node
        self._zones = zones
        self.readiness = LocalReadiness(on_changed=lambda keys: self.store.pod_changed(keys))
        self.store = ServiceStore(node, readiness=self.readiness.is_ready)
        self.publisher = ServicePublisher(self.store, is_for_all_nodes=others is not None)
        self.server = ServicesServer(
            self.publisher,
            path=localnet_socket(run_directory),
            inner=run_directory / "admin" / "localnet.sock",
            address=address,
        )
        self.nodes_server = (
            NodesServer(
                self.publisher,
                others.address,
                others.tls,
                inner=run_directory / "admin" / "nodes.sock",
            )
            if others
            else None
        )
        self.source = make_source(self._on_service_change, self._on_slice_change)
        self.saved_at: datetime.datetime | None = None
        """When the published state was saved; None once the source has confirmed it."""
        self._held: list[Callable[[], None]] | None = None
        """Changes of saved objects that wait until the source has sent all: the new version of one
        and the old one of another would be a partial state."""
        self._path = state or run_directory / "state" / "services.json"
        self._saver = StateSaver(
            self._path,
            self._content,
            failure=Event.SERVICES_NOT_SAVED,
            settle_seconds=_SAVE_SECONDS,
            bytes_per_second=_SAVED_BYTES_PER_SECOND,
            # The kubelet reports a pod before the slices have it: older reports would contradict
            # newer slices.
            after=saved_pods,
        )

    async def run(self) -> None:
        """Follow the source and serve until cancelled."""
        await self._restore()
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "source of services", self.source.run)
            tasks.start(group, "saved services", self._saver.run)
            tasks.start(group, "revisions to save", self._save_revisions)
            tasks.start(group, "revisions of service endpoints", self.publisher.run)
            tasks.start(group, "zones of nodes", self._follow)
            tasks.start(
                group,
                "socket of service endpoints",
                lambda: listen.run_always(self.server.run, Event.SERVICES_NOT_SERVED),
            )
            if (others := self.nodes_server) is not None:
                tasks.start(
                    group,
                    "service endpoints of other nodes",
                    lambda: listen.run_always(others.run, Event.SERVICES_NOT_SERVED),
                )

    @property
    def is_from_api(self) -> bool:
        return self.source.name == API_SERVER

    def problems(self) -> list[SourceProblem]:
        """For the agent's report, but for those of the API server."""
        by_part = {} if self.is_from_api else self.source.problems
        sentences = [f"services from {part}: {problem}" for part, problem in by_part.items()]
        if self.saved_at:
            at = self.saved_at.isoformat(timespec="seconds")
            sentences.append(
                f"services are those saved at {at}; {self.source.name} has not confirmed them since"
            )
        return [SourceProblem(part="services", text=text) for text in sentences]

    def set_pod(self, uid: str, pod: PodReports) -> None:
        """A pod of this node was added or changed; uid: the runtime's."""
        self.readiness.set_pod(uid, pod)

    def end_pod(self, uid: str) -> None:
        """A pod of this node was deleted, or its containers are done; by the runtime's uid."""
        self.readiness.end(uid)

    def condition_changed(self, uid: str, probes_passing: Condition | None) -> None:
        """The condition `probes-passing` of a pod may have changed."""
        self.readiness.set_probes(uid, probes_passing)

    async def _restore(self) -> None:
        """Publish what the previous process saved, until the source has sent all."""
        found = await asyncio.to_thread(saved.read, self._path)
        if found is None:
            return
        position = SourcePosition()
        if found.source == self.source.name:
            position = SourcePosition(found.services_version, found.slices_version)
        self.source.seed(found.services, found.slices, position)
        for service in found.services:
            self.store.set_service(None, service)
        for each in found.slices:
            self.store.set_slice(None, each)
        self._held = []
        self.readiness.restore(found.probed)
        self._set_zones({self._node: found.zone, **found.zones})
        self._set_saved(SavedRevision(found.instance_id, found.rev, found.saved_at))
        self.publisher.complete()
        log.info(Event.SAVED_SERVICES_RESTORED, services=len(found.services))

    def _on_service_change(self, old: ApiService | None, new: ApiService | None) -> None:
        self._apply(lambda: self.store.set_service(old, new))

    def _on_slice_change(self, old: EndpointSlice | None, new: EndpointSlice | None) -> None:
        self._apply(lambda: self.store.set_slice(old, new))

    def _apply(self, change: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(change)
            return
        change()

    async def _save_revisions(self) -> None:
        """Have each revision of the source's objects saved."""
        rev = 0
        while True:
            rev = await self.publisher.wait_rev(rev)
            if self._held is None:
                self._saver.mark()

    def _content(self) -> SavedServices:
        position = self.source.position()
        return SavedServices(
            saved_at=self.source.as_of(),
            instance_id=self.publisher.instance_id,
            rev=self.publisher.rev,
            zone=self._zones.zones().get(self._node, ""),
            zones=dict(self._zones.zones()),
            source=self.source.name,
            services=list(self.source.services.values()),
            services_version=position.services_version,
            slices=list(self.source.slices.values()),
            slices_version=position.slices_version,
            probed=self.readiness.probed,
        )

    async def _follow(self) -> None:
        # A state is never partial, and never has the endpoints of another zone.
        await self._zones.synced.wait()
        await self.source.synced.wait()
        # Before a client gets a revision of this process, so that the next one can compare the two.
        await self._saver.save()
        held, self._held = self._held or [], None
        for change in held:
            change()
        while True:
            at = self.source.saved_at
            if at != self.saved_at:
                self._set_saved(SavedRevision(0, 0, at) if at else None)
            self._set_zones(self._zones.zones())
            self.publisher.complete()
            await asyncio.sleep(_FOLLOW_SECONDS)

    def _set_zones(self, zones: Mapping[str, str]) -> None:
        for node in self.store.zones.keys() - zones.keys():
            self.store.set_zone("", node)
        for node, zone in zones.items():
            self.store.set_zone(zone, node)

    def _set_saved(self, revision: SavedRevision | None) -> None:
        self.saved_at = revision.saved_at if revision else None
        self.publisher.set_saved(revision)

"""Service endpoints as a part of the agent: watches, local readiness, publisher and socket."""

import asyncio
import datetime
import pathlib
import random
from collections.abc import Callable

import structlog

from agent import backoff, tasks
from agent.api import server as servers
from agent.api.services import saved
from agent.api.services.local_readiness import LocalReadiness
from agent.api.services.objects import ZONE_LABEL, ApiService, EndpointSlice
from agent.api.services.publisher import ServicePublisher
from agent.api.services.saved import SavedServices
from agent.api.services.server import ServicesServer
from agent.api.services.store import ServiceStore
from agent.api.services.view import SavedRevision
from agent.kube.client import ApiClient
from agent.kube.objects import MetadataOnly
from agent.kube.pod_reports import PodReports
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.settings import localnet_socket
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

SERVICES = Query("services", "/api/v1/services", ApiService)
SLICES = Query("endpointslices", "/apis/discovery.k8s.io/v1/endpointslices", EndpointSlice)

# Some endpoint of a big cluster changes all the time, and its file has megabytes.
_SAVE_SECONDS = 10.0
# A node gets its zone once, soon after it joins.
_ZONE_SECONDS = 5.0


class ServiceEndpoints:
    """Which endpoints of each service this node uses, from the API server to the socket."""

    def __init__(
        self,
        api: ApiClient,
        *,
        node: str,
        nodes: Watcher[MetadataOnly],
        run_directory: pathlib.Path,
        address: tuple[str, int] | None = None,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """nodes: a watch of this node, run by the caller; address: of the loopback, to serve there
        as well.
        """
        self._node = node
        self._nodes = nodes
        self.readiness = LocalReadiness(on_changed=lambda keys: self.store.pod_changed(keys))
        self.store = ServiceStore(node, readiness=self.readiness.is_ready)
        self.publisher = ServicePublisher(self.store)
        self.server = ServicesServer(
            self.publisher,
            path=localnet_socket(run_directory),
            inner=run_directory / "admin" / "localnet.sock",
            address=address,
        )
        self.services = Watcher(api, SERVICES, on_change=self._on_service_change, jitter=jitter)
        self.slices = Watcher(api, SLICES, on_change=self._on_slice_change, jitter=jitter)
        self._held: list[Callable[[], None]] | None = None
        """Changes of saved objects that wait until all resources are listed: the new version of one
        and the old one of another would be a partial state."""
        self._path = run_directory / "state" / "services.json"
        self._saver = StateSaver(
            self._path,
            self._content,
            failure=Event.SERVICES_NOT_SAVED,
            settle_seconds=_SAVE_SECONDS,
        )

    async def run(self) -> None:
        """Watch and serve until cancelled."""
        await self._restore()
        async with asyncio.TaskGroup() as group:
            for watcher in (self.services, self.slices):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            tasks.start(group, "saved services", self._saver.run)
            tasks.start(group, "revisions to save", self._save_revisions)
            tasks.start(group, "revisions of service endpoints", self.publisher.run)
            tasks.start(group, "zone of the node", self._follow_zone)
            tasks.start(
                group,
                "socket of service endpoints",
                lambda: servers.run_always(self.server.run, Event.SERVICES_NOT_SERVED),
            )

    @property
    def problems(self) -> dict[str, str]:
        """The problem of each resource's watch; empty if there is none."""
        return {one.query.name: one.problem for one in (self.services, self.slices)}

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
        """Publish what the previous agent saved, until the API server has sent all."""
        found = await asyncio.to_thread(saved.read, self._path)
        if found is None:
            return
        self.services.seed(found.services, found.services_version)
        self.slices.seed(found.slices, found.slices_version)
        for service in found.services:
            self.store.set_service(None, service)
        for each in found.slices:
            self.store.set_slice(None, each)
        self._held = []
        self.readiness.restore(found.probed)
        self.store.set_zone(found.zone)
        self.publisher.set_saved(SavedRevision(found.instance_id, found.rev, found.saved_at))
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
        """Have each revision of the API server's objects saved."""
        rev = 0
        while True:
            rev = await self.publisher.wait_rev(rev)
            if self._held is None:
                self._saver.mark()

    def _content(self) -> SavedServices:
        return SavedServices(
            saved_at=datetime.datetime.now(datetime.UTC),
            instance_id=self.publisher.instance_id,
            rev=self.publisher.rev,
            zone=self._zone(),
            services=list(self.services.objects.values()),
            services_version=self.services.version,
            slices=list(self.slices.objects.values()),
            slices_version=self.slices.version,
            probed=self.readiness.probed,
        )

    def _zone(self) -> str:
        found = self._nodes.objects.get(("", self._node))
        return found.metadata.labels.get(ZONE_LABEL, "") if found else ""

    async def _follow_zone(self) -> None:
        # A state is never partial, and never has the endpoints of another zone.
        for watcher in (self._nodes, self.services, self.slices):
            await watcher.synced.wait()
        # Before a client gets a revision of this agent, so that the next agent can compare the two.
        await self._saver.save()
        held, self._held = self._held or [], None
        for change in held:
            change()
        self.publisher.set_saved(None)
        while True:
            self.store.set_zone(self._zone())
            self.publisher.complete()
            await asyncio.sleep(_ZONE_SECONDS)

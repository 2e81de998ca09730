"""Service endpoints as a part of the agent: watches, local readiness, publisher and socket."""

import asyncio
import pathlib
import random

from agent import backoff, tasks
from agent.api import server as servers
from agent.api.services.local_readiness import LocalReadiness
from agent.api.services.objects import ZONE_LABEL, ApiService, EndpointSlice
from agent.api.services.publisher import ServicePublisher
from agent.api.services.server import ServicesServer
from agent.kube.client import ApiClient
from agent.kube.objects import MetadataOnly
from agent.kube.pod_reports import PodReports
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.settings import localnet_socket

SERVICES = Query("services", "/api/v1/services", ApiService)
SLICES = Query("endpointslices", "/apis/discovery.k8s.io/v1/endpointslices", EndpointSlice)

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
        self.readiness = LocalReadiness(on_changed=lambda keys: self.publisher.pod_changed(keys))
        self.publisher = ServicePublisher(node, readiness=self.readiness.is_ready)
        self.server = ServicesServer(
            self.publisher,
            path=localnet_socket(run_directory),
            inner=run_directory / "admin" / "localnet.sock",
            address=address,
        )
        self.services = Watcher(api, SERVICES, on_change=self.publisher.set_service, jitter=jitter)
        self.slices = Watcher(api, SLICES, on_change=self.publisher.set_slice, jitter=jitter)

    async def run(self) -> None:
        """Watch and serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in (self.services, self.slices):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
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

    def forget_pod(self, uid: str) -> None:
        """A pod of this node was deleted; by the runtime's uid."""
        self.readiness.forget(uid)

    def condition_changed(self, uid: str, probes_passing: Condition | None) -> None:
        """The condition `probes-passing` of a pod may have changed."""
        self.readiness.set_probes(uid, probes_passing)

    async def _follow_zone(self) -> None:
        # A state is never partial, and never has the endpoints of another zone.
        for watcher in (self._nodes, self.services, self.slices):
            await watcher.synced.wait()
        while True:
            found = self._nodes.objects.get(("", self._node))
            self.publisher.set_zone(found.metadata.labels.get(ZONE_LABEL, "") if found else "")
            self.publisher.complete()
            await asyncio.sleep(_ZONE_SECONDS)

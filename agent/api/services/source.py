"""Services, EndpointSlices, this node's zone and its pods' news, brought together and served."""

import asyncio
import pathlib
import random
from typing import Final

import structlog

from agent import backoff, tasks
from agent.api.services.local_readiness import LocalNews
from agent.api.services.objects import ZONE_LABEL, EndpointSlice, Service
from agent.api.services.publisher import Book
from agent.api.services.server import ListenError, Server
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, MetadataOnly
from agent.kube.watcher import Query, Watcher
from agent.pods.conditions import Condition
from agent.settings import localnet_socket

log = structlog.get_logger(__name__)

SERVICES: Final = Query("services", "/api/v1/services", Service)
SLICES: Final = Query("endpointslices", "/apis/discovery.k8s.io/v1/endpointslices", EndpointSlice)

# A node gets its zone once, soon after it joins.
_ZONE_SECONDS: Final = 5.0
_LISTEN_AGAIN_SECONDS: Final = 10.0


class ServiceEndpoints:
    """What this node should use of each service, from the API server to the socket."""

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
        """nodes: a watch of this node, run by somebody else; address: of the loopback, to serve
        there as well.
        """
        self._node = node
        self._nodes = nodes
        self._socket = localnet_socket(run_directory)
        self._inner = run_directory / "admin" / "localnet.sock"
        self._address = address
        self.news = LocalNews(on_change=lambda keys: self.book.hear(keys))
        self.book = Book(node, news=self.news.is_ready)
        self.server = Server(self.book)
        self.services = Watcher(api, SERVICES, on_change=self.book.set_service, jitter=jitter)
        self.slices = Watcher(api, SLICES, on_change=self.book.set_slice, jitter=jitter)

    async def run(self) -> None:
        """Watch and serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in (self.services, self.slices):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            tasks.start(group, "revisions of service endpoints", self.book.run)
            tasks.start(group, "zone of the node", self._follow_zone)
            tasks.start(group, "socket of service endpoints", self._serve)

    @property
    def problems(self) -> dict[str, str]:
        """What the API server, or its absence, said last of each resource; empty if all is well."""
        return {one.query.name: one.problem for one in (self.services, self.slices)}

    def see_pod(self, pod: ApiPod) -> None:
        """A pod of this node came or changed."""
        self.news.see(pod)

    def forget_pod(self, uid: str) -> None:
        """A pod of this node is gone; by the runtime's uid."""
        self.news.forget(uid)

    def changed(self, uid: str, probes_passing: Condition | None) -> None:
        """What podgate's probes say of a pod may be something else now."""
        self.news.note(uid, probes_passing)

    async def _serve(self) -> None:
        # An agent without this socket still guards the node.
        while True:
            try:
                async with self.server.serving(self._socket, self._inner, self._address):
                    await asyncio.get_running_loop().create_future()
            except ListenError as error:
                log.error("service endpoints are not served", problem=str(error))
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    async def _follow_zone(self) -> None:
        # Never a part of the state, nor the endpoints of another zone.
        for watcher in (self._nodes, self.services, self.slices):
            await watcher.synced.wait()
        while True:
            found = self._nodes.objects.get(("", self._node))
            self.book.set_zone(found.metadata.labels.get(ZONE_LABEL, "") if found else "")
            self.book.complete()
            await asyncio.sleep(_ZONE_SECONDS)

"""Services and EndpointSlices of the API server."""

import asyncio
import datetime
import random

from agent import backoff, tasks
from agent.kube.client import ApiClient
from agent.kube.watcher import Query, Watcher
from agent.services.api.object_source import (
    API_SERVER,
    OnService,
    OnSlice,
    Services,
    Slices,
    SourcePosition,
)
from agent.services.api.objects import ApiService, EndpointSlice

SERVICES = Query("services", "/api/v1/services", ApiService)
SLICES = Query("endpointslices", "/apis/discovery.k8s.io/v1/endpointslices", EndpointSlice)


class ApiObjects:
    """An `ObjectSource`: two watches."""

    name = API_SERVER
    saved_at: datetime.datetime | None = None

    def __init__(
        self,
        api: ApiClient,
        *,
        on_service: OnService,
        on_slice: OnSlice,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self.service_watch = Watcher(api, SERVICES, on_change=on_service, jitter=jitter)
        self.slice_watch = Watcher(api, SLICES, on_change=on_slice, jitter=jitter)
        self.synced = asyncio.Event()

    @property
    def services(self) -> Services:
        return self.service_watch.objects

    @property
    def slices(self) -> Slices:
        return self.slice_watch.objects

    def as_of(self) -> datetime.datetime:
        """Bookmarks come about once a minute."""
        loop = asyncio.get_running_loop()
        received = [
            one.received_at for one in (self.service_watch, self.slice_watch) if one.received_at
        ]
        age_seconds = loop.time() - min(received, default=loop.time())
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_seconds)

    @property
    def problems(self) -> dict[str, str]:
        watches = (self.service_watch, self.slice_watch)
        return {one.query.name: one.problem for one in watches if one.problem}

    def position(self) -> SourcePosition:
        return SourcePosition(self.service_watch.version, self.slice_watch.version)

    def seed(
        self, services: list[ApiService], slices: list[EndpointSlice], position: SourcePosition
    ) -> None:
        self.service_watch.seed(services, position.services_version)
        self.slice_watch.seed(slices, position.slices_version)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in (self.service_watch, self.slice_watch):
                tasks.start(group, f"watch of {watch.query.name}", watch.run)
            tasks.start(group, "lists of services", self._wait)

    async def _wait(self) -> None:
        await self.service_watch.synced.wait()
        await self.slice_watch.synced.wait()
        self.synced.set()
        await asyncio.Event().wait()

"""PodInfo as a part of the agent: what it is fed by, its sockets, its metrics."""

import asyncio
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import structlog
from prometheus_client import core

from agent import tasks
from agent.api.peer_credentials import DoorError
from agent.api.podinfo import pod_conditions, pod_objects
from agent.api.podinfo.node_pods import NodePods
from agent.api.podinfo.pod_conditions import Sightings
from agent.api.podinfo.pod_objects import PodObjects
from agent.api.podinfo.pods_api import PodsApi
from agent.api.podinfo.publisher import Telling
from agent.api.podinfo.server import GET, LIST, PodInfoServer
from agent.kube.api_pods import ApiPods
from agent.metrics import Family, family
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import Condition
from agent.pods.pod import Pod

log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 60.0

REQUESTS = Family(
    "pod_info_endpoint_requests_total", "counter", "Requests of PodInfo (KEP-4188), of any method."
)
REQUESTS_LIST = Family(
    "pod_info_endpoint_requests_list", "counter", "Requests of its ListPodConditions."
)
REQUESTS_GET = Family(
    "pod_info_endpoint_requests_get", "counter", "Requests of its GetPodConditions."
)
ERRORS_GET = Family(
    "pod_info_endpoint_errors_get", "counter", "Requests of its GetPodConditions that failed."
)
WATCHERS = Family("podgate_pod_info_watchers", "gauge", "Watches of PodInfo that are open.")
REFUSED = Family(
    "podgate_pod_info_refused_total",
    "counter",
    "Readers of PodInfo that were told to come later, by what they had too much of.",
    ("reason",),
)

FAMILIES = (REQUESTS, REQUESTS_LIST, REQUESTS_GET, ERRORS_GET, WATCHERS, REFUSED)


def socket(run_directory: pathlib.Path) -> pathlib.Path:
    """In a directory of its own: clients mount directories, since a socket is made anew."""
    return run_directory / "podinfo" / "podinfo.sock"


class PodInfo:
    """Tells what is true of all pods of the node; `hint` it when something may have changed."""

    def __init__(
        self,
        run_directory: pathlib.Path,
        *,
        pods: Callable[[], Iterable[Pod]],
        conditions_of: Callable[[str], list[Condition]],
        changes: Iterable[Changes],
        source: ApiPods | None,
        unready_because: Callable[[], str | None],
    ) -> None:
        """pods: those that the agent gates; changes: of them and their conditions; source: in a
        cluster, all that API server and kubelet tell; unready_because: why these are not all of
        the node yet, else None."""
        everything = NodePods(pods=pods, conditions_of=conditions_of, source=source).everything
        self._conditions = Telling(
            everything,
            teller=Sightings,
            header=pod_conditions.header,
            unready_because=unready_because,
        )
        self._objects = Telling(
            everything,
            teller=PodObjects,
            header=pod_objects.header,
            unready_because=unready_because,
        )
        self._server = PodInfoServer(
            self._conditions,
            path=socket(run_directory),
            inner=run_directory / "admin" / "podinfo.sock",
        )
        self._changes = tuple(changes)
        self._pods_api = PodsApi(self._objects, run_directory / "pods-api" / "pods-api.sock")
        if source is not None:
            source.on_any_change = self.hint

    @property
    def is_ready(self) -> asyncio.Event:
        """Whether everything can be told."""
        return self._conditions.is_ready

    def hint(self) -> None:
        """Something about a pod may have changed."""
        self._conditions.hint()
        self._objects.hint()

    async def run(self) -> None:
        """Tell, until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "changes of pods", self._follow)
            tasks.start(group, "pod conditions", self._conditions.run)
            tasks.start(group, "pod objects", self._objects.run)
            tasks.start(group, "podinfo socket", lambda: _keep(self._server.run))
            tasks.start(group, "pods-api socket", lambda: _keep(self._pods_api.run))

    async def _follow(self) -> None:
        changes = Subscription()
        for kind in self._changes:
            kind.subscribe(changes)
        self.hint()
        while True:
            await changes.next()
            self.hint()

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        server = self._server
        yield _count(REQUESTS, server.requests.total())
        yield _count(REQUESTS_LIST, server.requests[LIST])
        yield _count(REQUESTS_GET, server.requests[GET])
        yield _count(ERRORS_GET, server.errors[GET])
        watchers = family(WATCHERS)
        watchers.add_metric((), server.watchers)
        yield watchers
        refused = family(REFUSED)
        for reason, count in sorted(server.refusals().items()):
            refused.add_metric((reason,), count)
        yield refused


async def _keep(run: Callable[[], Awaitable[None]]) -> None:
    """A socket that cannot be made is no reason to guard no pods."""
    while True:
        try:
            await run()
        except DoorError as error:
            log.error("readers on the node are not served", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)


def _count(of: Family, value: int) -> core.Metric:
    """By the KEP's name to the letter: for a counter prometheus_client would add `_total`."""
    metric = core.Metric(of.name, of.help, "unknown")
    metric.add_sample(of.name, {}, value)
    return metric

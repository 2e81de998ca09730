"""PodInfo as a part of the agent: its sources, its sockets, its metrics."""

import asyncio
import pathlib
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import core

from agent import tasks
from agent.api import server as servers
from agent.api.podinfo import pod_conditions, pod_objects
from agent.api.podinfo.pod_conditions import ConditionsEncoder
from agent.api.podinfo.pod_objects import PodsEncoder
from agent.api.podinfo.pods_api import PodsApiServer
from agent.api.podinfo.publisher import PodsPublisher
from agent.api.podinfo.records import PodRecords
from agent.api.podinfo.server import GET, LIST, WATCH, PodInfoServer
from agent.kube.api_pods import ApiPods
from agent.logs import Event
from agent.metrics import MetricFamily, labelled, single
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import Condition
from agent.pods.pod import Pod

# By the KEP's names to the letter, which its own counters have without `_total`.
KEP_REQUESTS = MetricFamily(
    "pod_info_endpoint_requests_total", "untyped", "PodInfo requests, by the name of KEP-4188."
)
KEP_REQUESTS_LIST = MetricFamily(
    "pod_info_endpoint_requests_list", "untyped", "ListPodConditions requests (KEP-4188)."
)
KEP_REQUESTS_GET = MetricFamily(
    "pod_info_endpoint_requests_get", "untyped", "GetPodConditions requests (KEP-4188)."
)
KEP_ERRORS_GET = MetricFamily(
    "pod_info_endpoint_errors_get", "untyped", "Failed GetPodConditions requests (KEP-4188)."
)
REQUESTS = MetricFamily(
    "podgate_podinfo_requests_total", "counter", "PodInfo requests, by method.", ("method",)
)
ERRORS = MetricFamily(
    "podgate_podinfo_errors_total", "counter", "Failed PodInfo requests, by method.", ("method",)
)
WATCHES = MetricFamily("podgate_podinfo_watches", "gauge", "Open PodInfo watches.")
REJECTED = MetricFamily(
    "podgate_podinfo_rejected_total",
    "counter",
    "PodInfo connections and requests rejected by a limit, by limit.",
    ("reason",),
)


def socket(run_directory: pathlib.Path) -> pathlib.Path:
    """In a directory of its own: clients mount directories, since each agent creates the socket."""
    return run_directory / "podinfo" / "podinfo.sock"


class PodInfoService:
    """Publishes the state of all pods of the node."""

    def __init__(
        self,
        run_directory: pathlib.Path,
        *,
        pods: Callable[[], Iterable[Pod]],
        conditions_of: Callable[[str], list[Condition]],
        changes: Iterable[Changes],
        source: ApiPods | None,
        synced: asyncio.Event,
        unready_because: Callable[[], str | None],
    ) -> None:
        """pods: the agent's; changes: of them and their conditions; source: in a cluster, the pods
        of API server and kubelet; synced: set once these are all pods of the node; unready_because:
        why they are not yet."""
        records = PodRecords(pods=pods, conditions_of=conditions_of, source=source)
        self._conditions = PodsPublisher(
            records.all,
            encoder=ConditionsEncoder,
            header=pod_conditions.header,
            synced=synced,
            unready_because=unready_because,
        )
        self._objects = PodsPublisher(
            records.all,
            encoder=PodsEncoder,
            header=pod_objects.header,
            synced=synced,
            unready_because=unready_because,
        )
        self._server = PodInfoServer(
            self._conditions,
            path=socket(run_directory),
            inner=run_directory / "admin" / "podinfo.sock",
        )
        self._pods_api = PodsApiServer(self._objects, run_directory / "pods-api" / "pods-api.sock")
        self._changes = (*changes, source.changes) if source else tuple(changes)

    @property
    def is_ready(self) -> asyncio.Event:
        """Set with the first complete list."""
        return self._conditions.is_ready

    async def run(self) -> None:
        """Publish and serve until cancelled."""
        failed = Event.PODINFO_NOT_SERVED
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "changes of pods", self._follow)
            tasks.start(group, "pod conditions", self._conditions.run)
            tasks.start(group, "pod objects", self._objects.run)
            tasks.start(
                group, "podinfo socket", lambda: servers.run_always(self._server.run, failed)
            )
            tasks.start(
                group, "pods-api socket", lambda: servers.run_always(self._pods_api.run, failed)
            )

    async def _follow(self) -> None:
        changed = Subscription()
        for kind in self._changes:
            kind.subscribe(changed)
        while True:
            self._conditions.hint()
            self._objects.hint()
            await changed.next()

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        server = self._server
        yield single(KEP_REQUESTS, server.requests.total())
        yield single(KEP_REQUESTS_LIST, server.requests[LIST])
        yield single(KEP_REQUESTS_GET, server.requests[GET])
        yield single(KEP_ERRORS_GET, server.errors[GET])
        methods = (GET, LIST, WATCH)
        yield labelled(REQUESTS, (((method,), server.requests[method]) for method in methods))
        yield labelled(ERRORS, (((method,), server.errors[method]) for method in methods))
        yield single(WATCHES, server.watches)
        yield labelled(
            REJECTED, (((limit,), count) for limit, count in sorted(server.rejected.items()))
        )

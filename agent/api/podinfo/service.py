"""PodInfo as a part of the agent: its sources, its sockets, its metrics."""

import asyncio
import pathlib
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import core

from agent import tasks
from agent.api import server as servers
from agent.api.podinfo import metrics, sockets
from agent.api.podinfo.pod_objects import PodObjects
from agent.api.podinfo.pods_api import PodsApiServer
from agent.api.podinfo.publisher import PodsPublisher
from agent.api.podinfo.records import PodRecords
from agent.api.podinfo.server import PodInfoServer
from agent.kube.node_pods import NodePods
from agent.logs import Event
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import Condition
from agent.pods.pod import Pod


class PodInfoService:
    """Publishes the state of all pods of the node."""

    def __init__(
        self,
        run_directory: pathlib.Path,
        *,
        uids: Callable[[], Iterable[str]],
        pod_of: Callable[[str], Pod | None],
        conditions_of: Callable[[str], list[Condition]],
        addresses_of: Callable[[str], tuple[str, ...]],
        changes: Iterable[Changes],
        source: NodePods | None,
        synced: asyncio.Event,
        unready_because: Callable[[], str | None],
    ) -> None:
        """uids, pod_of, addresses_of: the agent's pods, with confirmed addresses; changes: of them
        and their conditions; source: in a cluster, the pods of API server and kubelet; synced: set
        once these are all pods of the node; unready_because: why they are not yet."""
        records = PodRecords(
            uids=uids,
            pod_of=pod_of,
            conditions_of=conditions_of,
            addresses_of=addresses_of,
            source=source,
        )
        self._publisher = PodsPublisher(records, synced=synced, unready_because=unready_because)
        self._changed_objects = Changes()
        self._server = PodInfoServer(
            self._publisher, path=sockets.podinfo(run_directory), inner=sockets.inner(run_directory)
        )
        self._pods_api = PodsApiServer(
            PodObjects(records),
            sockets.pods_api(run_directory),
            changes=self._changed_objects,
            synced=synced,
            unready_because=unready_because,
        )
        self._changes = (*changes, source.changes) if source else tuple(changes)

    @property
    def is_ready(self) -> asyncio.Event:
        """Set with the first complete list."""
        return self._publisher.is_ready

    async def run(self) -> None:
        """Publish and serve until cancelled."""
        failed = Event.PODINFO_NOT_SERVED
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "changes of pods", self._follow)
            tasks.start(group, "pod conditions", self._publisher.run)
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
            for uid in await changed.next():
                self._publisher.hint_pod(uid)
                self._changed_objects.mark(uid)

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        yield from metrics.collect_podinfo(self._server)
        yield from metrics.collect_pods_api(self._pods_api)

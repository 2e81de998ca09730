"""PodInfo as a part of the agent: its sources, its sockets, its metrics."""

import asyncio
import contextlib
import pathlib
import socket
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import structlog
from prometheus_client import core

from agent import tasks
from agent.api import listen, peer_credentials
from agent.api.podinfo import metrics, sockets
from agent.api.podinfo.publisher import PodsPublisher
from agent.api.podinfo.records import PodRecords
from agent.kube.node_pods import NodePods
from agent.logs import Event
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import Condition
from agent.pods.pod import Pod

if TYPE_CHECKING:
    from agent.api.podinfo.pods_api import PodsApiServer
    from agent.api.podinfo.server import PodInfoServer

log = structlog.get_logger(__name__)


class PodInfoService:
    """Publishes the state of all pods of the node.

    Each socket exists from the start, but gRPC, which takes 13 MB and wakes up seven times a
    second, is imported and started when the first client connects. That connection waits
    meanwhile, some tenths of a second.
    """

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
        self._records = PodRecords(
            uids=uids,
            pod_of=pod_of,
            conditions_of=conditions_of,
            addresses_of=addresses_of,
            source=source,
        )
        self._publisher = PodsPublisher(
            self._records, synced=synced, unready_because=unready_because
        )
        self._changed_objects = Changes()
        self._run_directory = run_directory
        self._synced = synced
        self._unready_because = unready_because
        self._server: PodInfoServer | None = None
        self._pods_api: PodsApiServer | None = None
        """None until their first client connects."""
        self._is_listening = asyncio.Event()
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
                group, "podinfo socket", lambda: listen.run_always(self._serve_podinfo, failed)
            )
            tasks.start(
                group, "pods-api socket", lambda: listen.run_always(self._serve_pods_api, failed)
            )
            await self._is_listening.wait()
            await self.is_ready.wait()
            log.info(Event.PODINFO_SERVING, socket=str(sockets.podinfo(self._run_directory)))

    async def _serve_podinfo(self) -> None:
        path = sockets.podinfo(self._run_directory)
        listening = peer_credentials.listen_publicly(path)
        self._is_listening.set()
        with _removed_on_failure(listening, path):
            await listen.first_client(listening)
            module = await asyncio.to_thread(_import_server)
            self._server = server = module.PodInfoServer(
                self._publisher,
                path=path,
                inner=sockets.inner(self._run_directory),
                listening=listening,
            )
        await listen.run_always(server.run, Event.PODINFO_NOT_SERVED)

    async def _serve_pods_api(self) -> None:
        path = sockets.pods_api(self._run_directory)
        listening = listen.unix_socket(path, directory_mode=0o700, mode=0o600)
        listening.listen(listen.BACKLOG)
        with _removed_on_failure(listening, path):
            await listen.first_client(listening)
            module = await asyncio.to_thread(_import_pods_api)
            self._pods_api = server = module.PodsApiServer(
                module.PodObjects(self._records),
                path,
                changes=self._changed_objects,
                synced=self._synced,
                unready_because=self._unready_because,
                listening=listening,
            )
        await listen.run_always(server.run, Event.PODINFO_NOT_SERVED)

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
        yield from metrics.collect_podinfo(self._server or metrics.NoPodInfoClients())
        yield from metrics.collect_pods_api(self._pods_api.requests if self._pods_api else {})


@contextlib.contextmanager
def _removed_on_failure(listening: socket.socket, path: pathlib.Path) -> Iterator[None]:
    """Remove the socket and its file if the block does not end."""
    try:
        yield
    except BaseException:
        listen.close(listening, path)
        raise


def _import_server() -> ModuleType:
    from agent.api.podinfo import server

    return server


def _import_pods_api() -> ModuleType:
    from agent.api.podinfo import pods_api

    return pods_api

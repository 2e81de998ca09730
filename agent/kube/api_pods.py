"""The node's pods from the API server; the kubelet's pods API feeds them, too.

Three watches: the node's pods, and as metadata only the node itself and all namespaces, for their
labels. All objects are saved: the next agent has them at once, and requests only what is newer.
"""

import asyncio
import pathlib
import random

import structlog

from agent import backoff, tasks
from agent.kube import saved_pods
from agent.kube.client import ApiClient
from agent.kube.node_pods import NodePods
from agent.kube.objects import ApiPod, MetadataOnly, WholePod
from agent.kube.pod_reports import API, KUBELET
from agent.kube.saved_pods import SavedObjects, SavedPods
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.modes import Labels
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_modes import PodModes
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

# Without the labels of node and namespaces pods would be published twice, and first too strictly.
# Where only the labels are unavailable (missing RBAC), the node's default is better than no gate.
_LABELS_SECONDS = 10.0
# A roll-out changes each pod some ten times; the file is for outages, not for the last second.
_SETTLE_SECONDS = 2.0


class ApiPods(NodePods):
    """The node's pods with the API server as an origin, which it follows."""

    def __init__(
        self,
        api: ApiClient,
        *,
        node_name: str,
        modes: PodModes,
        state: pathlib.Path | None = None,
        jitter: backoff.Jitter = random.random,
        keeps_whole: bool = False,
    ) -> None:
        """modes: gets the labels of node and namespaces;
        state: the file to save to; keeps_whole: whether `ApiPod.whole` is wanted."""
        super().__init__(modes)
        # Until the labels of node and namespaces are read.
        self._has_modes = False
        self.labels = ObjectLabels()
        """Those of node and namespaces."""
        self.pods = Watcher(
            api,
            Query(
                "pods",
                "/api/v1/pods",
                ApiPod,
                f"spec.nodeName={node_name}",
                on_read=_keep_whole if keeps_whole else None,
            ),
            on_change=self._on_pod_change,
            jitter=jitter,
        )
        self.namespaces = Watcher(
            api,
            Query("namespaces", "/api/v1/namespaces", MetadataOnly, is_metadata_only=True),
            on_change=self._on_namespace_change,
            jitter=jitter,
        )
        self.nodes = Watcher(
            api,
            Query(
                "nodes",
                "/api/v1/nodes",
                MetadataOnly,
                f"metadata.name={node_name}",
                is_metadata_only=True,
            ),
            on_change=self._on_node_change,
            jitter=jitter,
        )
        self._node_name = node_name
        self.saver = (
            StateSaver(
                state, self._content, failure=Event.PODS_NOT_SAVED, settle_seconds=_SETTLE_SECONDS
            )
            if state
            else None
        )
        """Of what all origins have; None without a file."""
        self._state = state

    def restore(self) -> None:
        """Add what the previous agent saved. Reads a file; call it once, before `run`."""
        if self._state is None:
            return
        saved = saved_pods.read(self._state, self._node_name)
        self.namespaces.seed(saved.namespaces.objects, saved.namespaces.version)
        self.nodes.seed(saved.nodes.objects, saved.nodes.version)
        self.pods.seed(saved.pods, saved.version)
        for node in saved.nodes.objects:
            self._modes.set_node(node.metadata.labels)
            self.labels.set_node(node.metadata.labels)
        for namespace in saved.namespaces.objects:
            self._modes.set_namespace(namespace.metadata.name, namespace.metadata.labels)
            self.labels.set_namespace(namespace.metadata.name, namespace.metadata.labels)
        if saved.nodes.version and saved.namespaces.version:
            self._modes.complete()
        if saved.pods:
            self._has_modes = self._is_listed = True
            for pod in saved.kubelet:
                self._by_origin[KUBELET][pod.uid] = pod
            for pod in saved.pods:
                self.set_pod(API, pod)
            log.info(Event.SAVED_PODS_RESTORED, pods=len(saved.pods))

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in (self.pods, self.namespaces, self.nodes):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            if self.saver:
                tasks.start(group, "saved pods", self.saver.run)
            await self._wait_for_labels()
            await self.pods.synced.wait()
            # Saved pods are confirmed.
            for uid in self.uids:
                self.changes.mark(uid)
            await self._labels_listed()
            if not self._modes.is_complete:
                self._modes.complete()
                self.refresh_all()

    @property
    def is_synced(self) -> bool:
        """Whether `current` has all pods of the node, also if only from the saved state."""
        return self._has_modes and (self.is_confirmed or self._is_listed)

    @property
    def is_confirmed(self) -> bool:
        """Whether the API server has listed its pods to this agent."""
        return self.pods.synced.is_set()

    async def _wait_for_labels(self) -> None:
        try:
            async with asyncio.timeout(_LABELS_SECONDS):
                await self._labels_listed()
        except TimeoutError:
            if not self._has_modes:
                log.warning(
                    Event.LABELS_UNKNOWN,
                    problem=self.namespaces.problem or self.nodes.problem,
                )
        else:
            self._modes.complete()
        self._has_modes = True
        self.refresh_all()

    async def _labels_listed(self) -> None:
        await self.namespaces.synced.wait()
        await self.nodes.synced.wait()

    def _on_pod_change(self, old: ApiPod | None, new: ApiPod | None) -> None:
        self._mark()
        if old is not None and (new is None or new.uid != old.uid):
            self.remove_pod(API, old.uid)
        if new is not None:
            self.set_pod(API, new)

    def _on_namespace_change(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        namespace = new or old
        if namespace is None or _labels(old) == _labels(new):
            return
        self._mark()
        name = namespace.metadata.name
        self.labels.set_namespace(name, _labels(new))
        if self._modes.set_namespace(name, _labels(new)):
            self.refresh_namespace(name)

    def _on_node_change(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        # The kubelet writes its Node every few minutes.
        if _labels(old) == _labels(new):
            return
        self._mark()
        self.labels.set_node(_labels(new))
        if self._modes.set_node(_labels(new)):
            self.refresh_all()

    def _mark(self) -> None:
        if self.saver:
            self.saver.mark()

    def _content(self) -> SavedPods:
        return SavedPods(
            node_name=self._node_name,
            pods=list(self._by_origin[API].values()),
            kubelet=[pod for uid, pod in self._by_origin[KUBELET].items() if self.of_api(uid)],
            version=self.pods.version,
            namespaces=SavedObjects(
                self.namespaces.version, list(self.namespaces.objects.values())
            ),
            nodes=SavedObjects(self.nodes.version, list(self.nodes.objects.values())),
        )


def _keep_whole(pod: ApiPod, content: bytes) -> None:
    pod.keep_whole(WholePod(content, is_json=True))


def _labels(found: MetadataOnly | None) -> Labels:
    return found.metadata.labels if found else {}

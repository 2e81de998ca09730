"""The node's pods from the API server and the kubelet, as the agent's `Pod`s.

Three watches: the node's pods, and as metadata only the node itself and all namespaces, for their
labels. The kubelet's pods API feeds `set_pod` and `remove_pod` too; `PodReports` decides which
report counts. All objects are saved: the next agent has them at once, and requests only what is
newer.
"""

import asyncio
import pathlib
import random

import structlog

from agent import backoff, tasks
from agent.kube import pod_reading, saved_pods
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, MetadataOnly, WholePod
from agent.kube.pod_reports import API, KUBELET, PodReports
from agent.kube.saved_pods import SavedObjects, SavedPods
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.changes import Changes
from agent.pods.modes import Labels
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod, Problem
from agent.pods.pod_modes import PodModes
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

# Without the labels of node and namespaces pods would be published twice, and first too strictly.
# Where only the labels are unavailable (missing RBAC), the node's default is better than no gate.
_LABELS_SECONDS = 10.0
# A roll-out changes each pod some ten times; the file is for outages, not for the last second.
_SETTLE_SECONDS = 2.0


class ApiPods:
    """The node's pods by the runtime's uid, kept up to date."""

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
        self.current: dict[str, Pod] = {}
        """Every pod that an origin has; none before the labels of node and namespaces are read."""
        self.changes = Changes()
        """Pods that an origin added, changed or removed, or whose mode may have changed."""
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
        self._modes = modes
        self.saver = (
            StateSaver(
                state, self._content, failure=Event.PODS_NOT_SAVED, settle_seconds=_SETTLE_SECONDS
            )
            if state
            else None
        )
        """Of what all origins have; None without a file."""
        self._state = state
        self._by_origin: dict[str, dict[str, ApiPod]] = {API: {}, KUBELET: {}}
        self._current: set[str] = set()
        """Pods that the kubelet's open stream has sent."""
        self._deleted: set[str] = set()
        """Pods that the kubelet has deleted, and the API server's watch has not yet."""
        self._is_listed = False
        """Whether an origin's list was complete once, by this agent or by the one that saved it."""
        self._warned: dict[str, set[Problem]] = {}
        self._has_labels = False

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
            self._has_labels = self._is_listed = True
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
        return self._has_labels and (self.pods.synced.is_set() or self._is_listed)

    def get(self, uid: str) -> ApiPod | None:
        """The newest object of a pod. The uid of its metadata may differ: static pods."""
        return self.reports(uid).newest

    @property
    def uids(self) -> set[str]:
        """Of all pods that an origin has."""
        return {uid for pods in self._by_origin.values() for uid in pods}

    @property
    def only_of_kubelet(self) -> set[str]:
        """Pods that the kubelet's open stream has and the API server has not, whose list is
        complete; without static pods, which no API server ever stored."""
        if not self.pods.synced.is_set():
            return set()
        pods = self._by_origin[KUBELET]
        return {
            uid
            for uid in self._current - self._by_origin[API].keys()
            if pods[uid].metadata.resource_version
        }

    def of_api(self, uid: str) -> ApiPod | None:
        """The API server's object of a pod."""
        return self._by_origin[API].get(uid)

    def reports(self, uid: str) -> PodReports:
        """What each origin last reported of a pod."""
        return PodReports(
            of_api=self.of_api(uid),
            of_kubelet=self._by_origin[KUBELET].get(uid),
            is_confirmed=self.pods.synced.is_set(),
            is_current=uid in self._current,
        )

    def set_pod(self, origin: str, pod: ApiPod) -> None:
        """An origin has this pod, new or changed."""
        uid = pod.uid
        if origin == KUBELET:
            self._current.add(uid)
            self._deleted.discard(uid)
            if pod != self._by_origin[KUBELET].get(uid):
                self._mark()
        elif uid in self._deleted:
            return  # The change precedes the deletion, and arrives later.
        self._by_origin[origin][uid] = pod
        self._refresh(uid)

    def remove_pod(self, origin: str, uid: str) -> None:
        """An origin has deleted this pod.

        The kubelet is the last to forget a pod, so a pod that it has removed is deleted, even if
        the API server could not report that yet. While it does not report the pod, the API server
        decides.
        """
        removed = self._by_origin[origin].pop(uid, None)
        if origin == KUBELET:
            self._current.discard(uid)
            if of_api := self._by_origin[API].pop(uid, None):
                self._deleted.add(uid)
                removed = of_api
        else:
            self._deleted.discard(uid)
            if uid not in self._current:
                removed = self._by_origin[KUBELET].pop(uid, removed)
        if removed is not None:
            self._mark()
            self._refresh(uid)

    def complete_kubelet_list(self) -> None:
        """The kubelet's stream has sent all of its pods.

        The others are gone, unless the API server has them: a kubelet that starts while that server
        is unreachable does not have its pods.
        """
        self._is_listed = True
        for uid in self._by_origin[KUBELET].keys() - self._current - self._by_origin[API].keys():
            del self._by_origin[KUBELET][uid]
            self._refresh(uid)

    def disconnect_kubelet(self) -> None:
        """The kubelet's stream has ended: its last reports stay, and may become outdated."""
        ended = list(self._current)
        self._current.clear()
        for uid in ended:
            self.changes.mark(uid)

    def refresh_all(self) -> None:
        """Derive every pod again: the modes of all may have changed."""
        for uid in self.uids:
            self._refresh(uid)

    def _refresh(self, uid: str) -> None:
        """Derive the pod from its newest object, and mark it."""
        found = self.get(uid)
        if found is None:
            self.current.pop(uid, None)
            self._warned.pop(uid, None)
        elif self._has_labels:
            self.current[uid] = self._read(uid, found)
        self.changes.mark(uid)

    def _read(self, uid: str, found: ApiPod) -> Pod:
        reading = pod_reading.read(found, self._modes)
        for problem in reading.warnings:
            if problem not in self._warned.get(uid, ()):
                log.warning(
                    Event.POD_SETTING_REJECTED,
                    pod=reading.pod.full_name,
                    uid=uid,
                    reason=problem.reason,
                    problem=problem.message,
                )
        self._warned[uid] = set(reading.warnings)
        return reading.pod

    def refresh_namespace(self, name: str) -> None:
        """The modes of a namespace's pods may have changed."""
        for uid in self.uids:
            pod = self.get(uid)
            if pod is not None and pod.metadata.namespace == name:
                self._refresh(uid)

    async def _wait_for_labels(self) -> None:
        try:
            async with asyncio.timeout(_LABELS_SECONDS):
                await self._labels_listed()
        except TimeoutError:
            if not self._has_labels:
                log.warning(
                    Event.LABELS_UNKNOWN,
                    problem=self.namespaces.problem or self.nodes.problem,
                )
        else:
            self._modes.complete()
        self._has_labels = True
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

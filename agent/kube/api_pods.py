"""The node's pods from the API server (and from whoever else knows them), told as manifests are.

Three watches: the node's pods, and as metadata only the node itself and all namespaces, for their
labels. Other origins (the kubelet's own API) feed `take` and `drop`; of one uid the newest resource
version counts, whoever brought it. What the API server told is saved, and told again at once by the
next agent, which then asks only for what is newer.
"""

import asyncio
import pathlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from agent import backoff, tasks
from agent.kube import modes, objects, pod_reading
from agent.kube.client import ApiClient
from agent.kube.objects import ApiPod, MetadataOnly
from agent.kube.saved_pods import SavedObjects, SavedPods, SavedPodsFile
from agent.kube.watcher import Query, Watcher
from agent.pods.pod import Pod, Problem
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

API: Final = "api"
KUBELET: Final = "kubelet"

# Without the labels of node and namespaces pods would be told twice, and first too strictly. When
# only those cannot be had (a right is missing), the node's default is better than no gate.
_LABELS_SECONDS = 10.0
# A roll-out changes each pod some ten times; the file is for outages, not for the last second.
_SETTLE_SECONDS = 2.0


class ApiPods:
    """Tells of every pod that is added, changed or removed; by the uid of the runtime."""

    def __init__(
        self,
        api: ApiClient,
        *,
        node_name: str,
        default_mode: Mode,
        on_pod: Callable[[Pod], None],
        on_removed: Callable[[str], None],
        on_object: Callable[[ApiPod], None] = lambda pod: None,
        on_warning: Callable[[Pod, Problem], None] = lambda pod, problem: None,
        state: pathlib.Path | None = None,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """on_pod: gets a new or changed pod, on_removed the uid of one that no origin has any more;
        on_object: each version of the API's object, for conditions; on_warning: what a pod's author
        should hear, once; state: the file to save to.
        """
        self.pods = Watcher(
            api,
            Query("pods", "/api/v1/pods", ApiPod, f"spec.nodeName={node_name}"),
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
        self._default_mode = default_mode
        self._on_pod = on_pod
        self._on_removed = on_removed
        self._on_object = on_object
        self._on_warning = on_warning
        self._file = SavedPodsFile(state) if state else None
        self._changed = asyncio.Event()
        self._made = 0
        self.on_any_change: Callable[[], None] = lambda: None
        """Called whenever an origin has told anything of a pod, or cannot be heard any more."""
        self._by_origin: dict[str, dict[str, ApiPod]] = {API: {}, KUBELET: {}}
        self._published: dict[str, Pod] = {}
        self._warned: dict[str, set[Problem]] = {}
        self._has_labels = False

    def restore(self) -> None:
        """Tell what an earlier agent saved. Reads a file; to be called once, before `run`."""
        if self._file is None:
            return
        saved = self._file.read(self._node_name)
        self.namespaces.seed(saved.namespaces.objects, saved.namespaces.version)
        self.nodes.seed(saved.nodes.objects, saved.nodes.version)
        self.pods.seed(saved.pods, saved.version)
        if saved.pods:
            self._has_labels = True
            for pod in saved.pods:
                self.take(API, pod)
            log.info("pods from before the restart are in force", pods=len(saved.pods))

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in (self.pods, self.namespaces, self.nodes):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            tasks.start(group, "saved pods", self._save)
            await self._wait_for_labels()
            await self.pods.synced.wait()
            # What was saved has been confirmed.
            self.on_any_change()

    @property
    def is_synced(self) -> bool:
        """Whether every pod of the node has been told, be it from before a restart."""
        return self._has_labels and (self.pods.synced.is_set() or bool(self._published))

    def get(self, uid: str) -> ApiPod | None:
        """The newest object of a pod. Its own uid, by which the API patches it, may be another."""
        of_api = self._by_origin[API].get(uid)
        of_kubelet = self._by_origin[KUBELET].get(uid)
        if of_api is None or of_kubelet is None:
            return of_api or of_kubelet
        version = of_kubelet.metadata.resource_version
        # A static pod's own manifest has no version: the API's copy of it says more.
        if not version or objects.is_older(version, of_api.metadata.resource_version):
            return of_api
        return of_kubelet

    @property
    def uids(self) -> set[str]:
        """Of all pods that an origin has."""
        return {uid for pods in self._by_origin.values() for uid in pods}

    def of_api(self, uid: str) -> ApiPod | None:
        """The API server's object of a pod."""
        return self._by_origin[API].get(uid)

    def of_kubelet(self, uid: str) -> ApiPod | None:
        """The kubelet's object of a pod."""
        return self._by_origin[KUBELET].get(uid)

    def namespace_labels(self, name: str) -> modes.Labels:
        """Empty for a namespace that is not known (yet)."""
        return _labels(self.namespaces.objects.get(("", name)))

    def take(self, origin: str, pod: ApiPod) -> None:
        """An origin has this pod, or another version of it."""
        self._by_origin[origin][pod.uid] = pod
        self.on_any_change()
        if origin == API:
            self._on_object(pod)
        self._publish(pod.uid)

    def drop(self, origin: str, uid: str) -> None:
        """An origin does not have this pod any more. The kubelet is the last to forget one, so what
        it has dropped is gone, even where the API server could not say so yet."""
        known = self._by_origin[origin].pop(uid, None)
        if origin == KUBELET:
            known = self._by_origin[API].pop(uid, known)
        if known is None:
            return
        self.on_any_change()
        if self.get(uid) is None:
            self._warned.pop(uid, None)
            if self._published.pop(uid, None):
                self._on_removed(uid)
        else:
            self._publish(uid)

    def leave(self, origin: str) -> None:
        """An origin cannot be heard any more: what others know as well is theirs to tell now."""
        pods = self._by_origin[origin]
        for uid in list(pods):
            if any(uid in others for others in self._by_origin.values() if others is not pods):
                del pods[uid]
                self._publish(uid)
        self.on_any_change()

    def _publish(self, uid: str) -> None:
        found = self.get(uid)
        if found is None or not self._has_labels:
            return
        node_mode = self._node_mode()
        namespace = self.namespace_labels(found.metadata.namespace)
        reading = pod_reading.read(found, node_mode=node_mode, namespace=namespace)
        if reading.pod != self._published.get(uid):
            self._published[uid] = reading.pod
            self._on_pod(reading.pod)
        warned = self._warned.setdefault(uid, set())
        for problem in reading.warnings:
            if problem not in warned:
                log.warning(
                    "pod asks for what it cannot have",
                    pod=reading.pod.full_name,
                    uid=uid,
                    reason=problem.reason,
                    detail=problem.message,
                )
                self._on_warning(reading.pod, problem)
        self._warned[uid] = set(reading.warnings)

    def _publish_all(self) -> None:
        for uid in self.uids:
            self._publish(uid)

    def _node_mode(self) -> Mode:
        node = self.nodes.objects.get(("", self._node_name))
        return modes.node_default(self._default_mode, _labels(node)).mode

    async def _wait_for_labels(self) -> None:
        try:
            async with asyncio.timeout(_LABELS_SECONDS):
                await self.namespaces.synced.wait()
                await self.nodes.synced.wait()
        except TimeoutError:
            if not self._has_labels:
                log.warning(
                    "labels of the node and of namespaces are not known; pods get the node's "
                    "default until they are",
                    problem=self.namespaces.problem or self.nodes.problem,
                )
        self._has_labels = True
        self._publish_all()

    def _on_pod_change(self, old: ApiPod | None, new: ApiPod | None) -> None:
        self._changed.set()
        if old is not None and (new is None or new.uid != old.uid):
            self.drop(API, old.uid)
        if new is not None:
            self.take(API, new)

    def _on_namespace_change(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        known = new or old
        if known is None or _labels(old) == _labels(new):
            return
        self._changed.set()
        name = known.metadata.name
        for pods in self._by_origin.values():
            for pod in list(pods.values()):
                if pod.metadata.namespace == name:
                    self._publish(pod.uid)

    def _on_node_change(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        # The kubelet writes its node every few minutes.
        if _labels(old) == _labels(new):
            return
        self._changed.set()
        for problem in modes.node_default(self._default_mode, _labels(new)).problems:
            log.warning("node's label is not understood", detail=problem.message)
        self._publish_all()

    async def _save(self) -> None:
        """Write the file soon after each change, and at the end."""
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                if self._file:
                    await asyncio.to_thread(self._file.write, *self._content())
        finally:
            if self._file and self._changed.is_set():
                self._file.write(*self._content())

    def _content(self) -> tuple[int, SavedPods]:
        self._made += 1
        return self._made, SavedPods(
            node_name=self._node_name,
            pods=list(self.pods.objects.values()),
            version=self.pods.version,
            namespaces=SavedObjects(
                self.namespaces.version, list(self.namespaces.objects.values())
            ),
            nodes=SavedObjects(self.nodes.version, list(self.nodes.objects.values())),
        )


def _labels(known: MetadataOnly | None) -> modes.Labels:
    return known.metadata.labels if known else {}

"""The pods of a node by what their origins report, as the agent's `Pod`s.

An origin is the API server or the kubelet: `PodReports` decides which report counts.
"""

import structlog

from agent.kube import pod_reading
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import API, KUBELET, PodReports
from agent.logs import Event
from agent.pods.changes import Changes
from agent.pods.pod import Pod, Problem
from agent.pods.pod_modes import PodModes

log = structlog.get_logger(__name__)


class NodePods:
    """The node's pods by the runtime's uid, as their origins add, change and remove them."""

    def __init__(self, modes: PodModes) -> None:
        self.current: dict[str, Pod] = {}
        """Every pod that an origin has; none before `modes` are those of this node."""
        self.changes = Changes()
        """Pods that an origin added, changed or removed, or whose mode may have changed."""
        self._modes = modes
        self._has_modes = True
        self._by_origin: dict[str, dict[str, ApiPod]] = {API: {}, KUBELET: {}}
        self._current: set[str] = set()
        """Pods that the kubelet's open stream has sent."""
        self._deleted: set[str] = set()
        """Pods that the kubelet has deleted, and the API server's watch has not yet."""
        self._is_listed = False
        """Whether an origin's list was complete once, by this agent or by the one that saved it."""
        self._warned: dict[str, set[Problem]] = {}
        self._specs = pod_reading.SpecReader()

    @property
    def is_synced(self) -> bool:
        """Whether `current` has all pods of the node, also if only from the saved state."""
        return self._has_modes and self._is_listed

    @property
    def is_confirmed(self) -> bool:
        """Whether the API server has listed its pods to this agent."""
        return False

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
        if not self.is_confirmed:
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
            is_confirmed=self.is_confirmed,
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
            self._mark()
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

    def refresh_namespace(self, name: str) -> None:
        """The modes of a namespace's pods may have changed."""
        for uid in self.uids:
            pod = self.get(uid)
            if pod is not None and pod.metadata.namespace == name:
                self._refresh(uid)

    def _refresh(self, uid: str) -> None:
        """Derive the pod from its newest object, and mark it."""
        found = self.get(uid)
        if found is None:
            self.current.pop(uid, None)
            self._warned.pop(uid, None)
            self._specs.forget(uid)
        elif self._has_modes:
            self.current[uid] = self._read(uid, found)
        self.changes.mark(uid)

    def _read(self, uid: str, found: ApiPod) -> Pod:
        reading = pod_reading.read(found, self._modes, self._specs.read)
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

    def _mark(self) -> None:
        """What is to be saved has changed."""

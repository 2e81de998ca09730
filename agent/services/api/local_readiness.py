"""Readiness of this node's pods, before the API server has it.

The rule. Two sources report whether a pod is ready: podgate's probes (`podgate.io/probes-passing`)
and the kubelet (`Ready`, from its pods API or as the API server has it: `PodReports`). The more
recent change counts; both clocks are this node's. Ready changes in whole seconds, truncated: within
the same second podgate's report counts, since podgate continues to probe and sees the next change
first. Where both agree, their report counts whatever the slices still have.

Of a pod that podgate does not probe, the kubelet's own report counts before the API server has it.
A pod that has ended, since it is deleted or its containers are done, is not ready, although slices
still have it. Slices that name only its address are not affected: another pod may get that.
A failing probe is enough to leave a pod out. Passing probes are enough to include it only if
nothing other than such probes was missing: neither another readiness gate, nor a container that
podgate cannot probe.
"""

import dataclasses
import datetime
from collections.abc import Callable

from agent import labels
from agent.kube import pod_reports
from agent.kube.pod_reports import KUBELET, PodReports
from agent.pods.conditions import TRUE, Condition
from probes.spec.handlers import KINDS

_READY = "Ready"
# Reasons of the condition (probes/engine/passing.py) that report results of probes; with others no
# probe runs.
_PASSING = "ProbesPassing"
_NOT_PASSING = ("ProbeFailing", "ContainerNotRunning")
_PENDING = "ProbePending"
# Until an agent that has just started has a pod's first result.
_STARTING = (_PENDING, "PodSpecUnknown", "NoNetns", "NotScheduled")
_NETWORK_PROBES = tuple(name for name, kind in KINDS.items() if kind.target)
# Slices lose ended pods within seconds, or once the API server is back; uids are not used again.
_MAX_ENDED = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeReadiness:
    """What podgate's probes report of a pod, and since when, in UTC."""

    is_ready: bool
    since: datetime.datetime


class LocalReadiness:
    """The pods whose readiness comes from this node and not from the slices."""

    def __init__(
        self,
        *,
        on_changed: Callable[[frozenset[str]], None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        """on_changed: gets the uid and the addresses by which slices name the changed pod."""
        self._on_changed = on_changed
        self._now = now
        self._probed: dict[str, ProbeReadiness] = {}
        self._restored: set[str] = set()
        """Pods whose probes had their last result with the previous agent."""
        self._pods: dict[str, PodReports] = {}
        self._by_key: dict[str, str] = {}
        """The runtime's uid of a pod by the API's uid, by namespace and name, and by address."""
        self._effective: dict[str, bool] = {}
        self._ended: dict[str, frozenset[str]] = {}
        """The uids by which slices name each ended pod; the oldest first."""

    def is_ready(self, pod_key: str, address: str) -> bool | None:
        """None if the slices count. pod_key: the API's uid, or namespace and name; empty where a
        slice names no pod."""
        return self._effective.get(self._by_key.get(pod_key or address, ""))

    @property
    def probed(self) -> dict[str, ProbeReadiness]:
        """What the probes report of each pod, to be saved."""
        return {uid: found for uid, found in self._probed.items() if uid in self._pods}

    def restore(self, probed: dict[str, ProbeReadiness]) -> None:
        """What the previous agent saved: it counts until the probes of this one have a result."""
        new = probed.keys() - self._probed.keys()
        self._restored |= new
        for uid in new:
            self._probed[uid] = probed[uid]
            self._publish(uid)

    def set_probes(self, uid: str, condition: Condition | None) -> None:
        """Set the pod's condition `probes-passing`. uid: the runtime's."""
        if uid in self._restored:
            if condition is None or condition.reason in _STARTING:
                return
            self._restored.remove(uid)
        is_ready = _probe_readiness(condition, self._probed.get(uid))
        if is_ready is None:
            self._probed.pop(uid, None)
        elif uid not in self._probed or self._probed[uid].is_ready != is_ready:
            self._probed[uid] = ProbeReadiness(is_ready, self._now())
        self._publish(uid)

    def set_pod(self, uid: str, pod: PodReports) -> None:
        """Set the pod as API server and kubelet report it. uid: the runtime's."""
        before = self._pods.get(uid)
        if before is None or _keys(before) != _keys(pod):
            self._remove(uid)
        self._pods[uid] = pod
        for key in _keys(pod):
            self._by_key[key] = uid
        self._publish(uid)

    def end(self, uid: str) -> None:
        """The pod was deleted, or its containers are done. uid: the runtime's."""
        if uid in self._ended:
            return
        pod = self._pods.get(uid)
        uids = frozenset((uid, *(_uids(pod) if pod else ())))
        self._probed.pop(uid, None)
        self._restored.discard(uid)
        self._remove(uid)
        self._ended[uid] = uids
        self._by_key.update(dict.fromkeys(uids, uid))
        self._effective[uid] = False
        self._on_changed(uids)
        if len(self._ended) > _MAX_ENDED:
            self._remove(next(iter(self._ended)))

    def _remove(self, uid: str) -> None:
        """Remove a pod, with what slices name it by."""
        pod = self._pods.pop(uid, None)
        keys = _keys(pod) if pod else self._ended.pop(uid, frozenset())
        for key in keys:
            if self._by_key.get(key) == uid:
                del self._by_key[key]
        if self._effective.pop(uid, None) is not None:
            self._on_changed(keys)

    def _publish(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        is_ready = effective_readiness(self._probed.get(uid), pod)
        if is_ready == self._effective.get(uid):
            return
        if is_ready is None:
            del self._effective[uid]
        else:
            self._effective[uid] = is_ready
        self._on_changed(_keys(pod))


def effective_readiness(probed: ProbeReadiness | None, pod: PodReports) -> bool | None:
    """Whether the pod is ready by this node's newest report; None where the slices have it."""
    kubelet = pod.condition(_READY)
    reported = kubelet is not None and kubelet.status == TRUE
    by_kubelet = reported if kubelet and pod.origin_of(_READY) == KUBELET else None
    if probed is None or _uses_host_network(pod):
        return by_kubelet
    if kubelet is not None and reported == probed.is_ready:
        return probed.is_ready
    at = pod_reports.transition_time(kubelet) if kubelet else None
    if at is not None and probed.since < at:
        return by_kubelet
    if probed.is_ready and not _depends_on_probes_only(pod):
        return by_kubelet
    return probed.is_ready


def _probe_readiness(condition: Condition | None, before: ProbeReadiness | None) -> bool | None:
    if condition is None:
        return None
    if condition.reason == _PASSING:
        return True
    # Pending without a previous result: the agent has just started. With one, the container is
    # new or has not passed often enough.
    is_pending = condition.reason == _PENDING and before is not None
    return False if is_pending or condition.reason in _NOT_PASSING else None


def _depends_on_probes_only(reports: PodReports) -> bool:
    """Whether only probes that podgate also runs, or podgate's own gate, can make it unready."""
    pod = reports.newest_status
    if pod is None:
        return False
    for gate in pod.gates - {labels.PROBES_PASSING}:
        condition = reports.condition(gate)
        if condition is None or condition.status != TRUE:
            return False
    probed = {
        container.name
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        if isinstance(container.readiness_probe, dict)
        and any(container.readiness_probe.get(kind) for kind in _NETWORK_PROBES)
    }
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    with_status = {status.name for status in pod.status.container_statuses}
    return {container.name for container in pod.spec.containers} <= with_status and all(
        status.ready or status.name in probed for status in statuses
    )


def _uses_host_network(pod: PodReports) -> bool:
    return pod.newest is not None and pod.newest.spec.host_network


def _keys(pod: PodReports) -> frozenset[str]:
    """What slices name the pod by."""
    found = [one for one in (pod.of_api, pod.of_kubelet) if one is not None]
    names = {f"{one.metadata.namespace}/{one.metadata.name}" for one in found}
    if not _uses_host_network(pod):
        names |= {address.ip for one in found for address in one.status.pod_ips}
    return _uids(pod) | names


def _uids(pod: PodReports) -> frozenset[str]:
    """Of static pods slices have the API server's uid."""
    return frozenset(one.metadata.uid for one in (pod.of_api, pod.of_kubelet) if one is not None)

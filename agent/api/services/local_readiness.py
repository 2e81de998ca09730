"""What podgate knows of the node's own pods before the API server does: whether they are ready.

The rule. Two say whether a pod is ready: podgate's probes (`podgate.io/probes-passing`) and the
kubelet (`Ready`, as the API has it). Who changed his mind last is believed; both clocks are this
node's. The API has whole seconds, cut off: in the same second podgate is believed, since it goes on
probing and is the first to see another change. Where both say the same, that is the truth whatever
the slices still say.

Only pods that podgate probes count. That they fail is enough to leave them out. That they pass is
enough to take them in only where nothing but such probes was missing: neither another readiness
gate, nor a container that podgate cannot ask.
"""

import datetime
from collections.abc import Callable
from typing import Final

import msgspec

from agent import labels
from agent.kube.objects import ApiPod
from agent.pods.conditions import TRUE, Condition

_READY: Final = "Ready"
# The condition's reasons (probes/engine/passing.py) that tell of probes; others say that none are
# run.
_PASSING: Final = "ProbesPassing"
_NOT_PASSING: Final = ("ProbeFailing", "ContainerNotRunning")
_PENDING: Final = "ProbePending"
_NETWORK_PROBES: Final = ("httpGet", "tcpSocket", "grpc")


class Word(msgspec.Struct, frozen=True):
    """What podgate's probes say of a pod, and since when, in UTC."""

    is_ready: bool
    since: datetime.datetime


class LocalNews:
    """Whose readiness is to be taken from podgate and not from the slices."""

    def __init__(
        self,
        *,
        on_change: Callable[[frozenset[str]], None],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        """on_change: gets the uid and the addresses by which slices name a pod with other news."""
        self._on_change = on_change
        self._now = now
        self._words: dict[str, Word] = {}
        self._pods: dict[str, ApiPod] = {}
        self._by_key: dict[str, str] = {}
        """The runtime's uid of a pod by the API's uid and by address."""
        self._told: dict[str, bool] = {}

    def is_ready(self, api_uid: str, address: str) -> bool | None:
        """None where the slices are to be believed. api_uid: empty where a slice names no pod."""
        return self._told.get(self._by_key.get(api_uid or address, ""))

    def note(self, uid: str, condition: Condition | None) -> None:
        """The pod's `probes-passing` is this now. uid: the runtime's."""
        says = _says(condition, self._words.get(uid))
        if says is None:
            self._words.pop(uid, None)
        elif uid not in self._words or self._words[uid].is_ready != says:
            self._words[uid] = Word(says, self._now())
        self._tell(uid)

    def see(self, pod: ApiPod) -> None:
        """The pod is this now, as the API has it."""
        before = self._pods.get(pod.uid)
        if before is not None and _keys(before) != _keys(pod):
            self._leave(pod.uid)
        self._pods[pod.uid] = pod
        for key in _keys(pod):
            self._by_key[key] = pod.uid
        self._tell(pod.uid)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._words.pop(uid, None)
        self._leave(uid)

    def _leave(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        keys = _keys(pod)
        for key in keys:
            if self._by_key.get(key) == uid:
                del self._by_key[key]
        if self._told.pop(uid, None) is not None:
            self._on_change(keys)

    def _tell(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        verdict = judge(self._words.get(uid), pod)
        if verdict == self._told.get(uid):
            return
        if verdict is None:
            del self._told[uid]
        else:
            self._told[uid] = verdict
        self._on_change(_keys(pod))


def judge(word: Word | None, pod: ApiPod) -> bool | None:
    """Whether the pod is ready by podgate's word; None where that is not the newest."""
    if word is None or pod.spec.host_network:
        return None
    kubelet = pod.condition(_READY)
    if kubelet is not None and (kubelet.status == TRUE) == word.is_ready:
        return word.is_ready
    if kubelet is not None and (at := _time(kubelet.last_transition_time)) and word.since < at:
        return None
    if word.is_ready and not _rests_on_probes(pod):
        return None
    return word.is_ready


def _says(condition: Condition | None, before: Word | None) -> bool | None:
    if condition is None:
        return None
    if condition.reason == _PASSING:
        return True
    # Pending without a word before is an agent that has just begun; after one, the container is
    # new or has not passed often enough.
    is_pending = condition.reason == _PENDING and before is not None
    return False if is_pending or condition.reason in _NOT_PASSING else None


def _rests_on_probes(pod: ApiPod) -> bool:
    """Whether nothing but probes that podgate runs as well, or its own gate, can hold it back."""
    for gate in pod.gates - {labels.PROBES_PASSING}:
        condition = pod.condition(gate)
        if condition is None or condition.status != TRUE:
            return False
    probed = {
        container.name
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        if isinstance(container.readiness_probe, dict)
        and any(container.readiness_probe.get(kind) for kind in _NETWORK_PROBES)
    }
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    known = {status.name for status in pod.status.container_statuses}
    return {container.name for container in pod.spec.containers} <= known and all(
        status.ready or status.name in probed for status in statuses
    )


def _keys(pod: ApiPod) -> frozenset[str]:
    own = () if pod.spec.host_network else (one.ip for one in pod.status.pod_ips)
    return frozenset((pod.metadata.uid, *own))


def _time(text: str | None) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found if found and found.tzinfo else None

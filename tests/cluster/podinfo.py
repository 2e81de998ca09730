"""PodInfo beside its sources: what the API server and the kubelet report of the same pods."""

import contextlib
import datetime
import http.client
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from agent.api.podinfo import sockets
from agent.client import podinfo
from agent.client.v1alpha1 import podinfo_pb2
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.kubelet.pods_api import SOCKET
from agent.pods.conditions import TYPES
from tests import polling
from tests.cluster.api import Api, ApiError
from tests.cluster.one_node import NAME
from tests.image.node import RUN_DIRECTORY

Key = tuple[str, str]
"""A pod's uid and the type of a condition."""
OWN_SOCKET = sockets.pods_api(pathlib.Path(RUN_DIRECTORY))
"""podgate's pods API."""
_LATE_SECONDS = 60.0
_RETRY_SECONDS = 0.1
_CALL_SECONDS = 5.0
_END = "end-of-the-comparison"


@contextlib.contextmanager
def client() -> Iterator[podinfo.PodInfoClient]:
    """Of the agent that has the node."""
    made = podinfo.PodInfoClient(f"unix://{RUN_DIRECTORY}/podinfo/podinfo.sock")
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def pods_api(socket: pathlib.Path) -> Iterator[Callable[[str], bytes]]:
    """GetPod of a pods API: the v1.Pod of a uid."""
    options = (("grpc.default_authority", "localhost"),)
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        call = channel.unary_unary(
            "/v1alpha1.Pods/GetPod",
            request_serializer=kubelet_pb2.GetPodRequest.SerializeToString,
            response_deserializer=kubelet_pb2.GetPodResponse.FromString,
        )

        def get(uid: str) -> bytes:
            response = call(kubelet_pb2.GetPodRequest(podUID=uid), timeout=_LATE_SECONDS)
            return bytes(response.pod)

        yield get


def without_conditions(content: bytes) -> bytes:
    """A v1.Pod without its conditions, of which podgate's may be ahead of the kubelet's."""
    pod = kubelet_pb2.Pod.FromString(content)
    del pod.status.conditions[:]
    return bytes(pod.SerializeToString(deterministic=True))


def until_as_in_the_api(follower: podinfo.PodInfoClient, api: Api) -> None:
    """Wait until both have the same pods, and PodInfo each condition of the API server."""
    found = [""]

    def check() -> bool:
        found.append(_difference(follower.list(_CALL_SECONDS), api))
        return not found[-1]

    try:
        polling.wait_until("PodInfo has what the API server has", check)
    except polling.TimedOutError as error:
        raise AssertionError(f"{error}: {found[-1]}") from error


def _difference(state: podinfo.PodInfoState, api: Api) -> str:
    """Pods that only one of both has, and conditions of the API that PodInfo lacks or has with
    another status; empty without any."""
    pods = api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={NAME}")
    name = podinfo_pb2.ConditionStatus.Name
    published = {
        (pod.pod_uid, one.type): name(one.status).removeprefix("CONDITION_STATUS_").capitalize()
        for pod in state.pods
        for one in pod.conditions
    }
    stored = {
        (pod["metadata"]["uid"], one["type"]): (pod["metadata"]["name"], one["status"])
        for pod in pods
        for one in pod["status"].get("conditions", [])
    }
    lines = [
        f"{pod}: {key[1]} {status}, but {published.get(key)}"
        for key, (pod, status) in stored.items()
        if published.get(key) != status
    ]
    of_api = {pod["metadata"]["uid"] for pod in pods}
    of_podinfo = {pod.pod_uid for pod in state.pods}
    lines += [f"{uid} only in PodInfo" for uid in sorted(of_podinfo - of_api)]
    lines += [f"{uid} only in the API" for uid in sorted(of_api - of_podinfo)]
    return "; ".join(lines)


class Comparison:
    """Follows PodInfo, the API server and the kubelet's pods API at once.

    Each report of a source has to be in PodInfo, or a later one of the same condition, within a
    minute. What PodInfo has of a condition never gets older again, nor does the condition vanish
    while its pod exists.
    """

    def __init__(self, api: Api, *, kept: set[str]) -> None:
        """kept: uids of pods that exist all the time, so each state must have them."""
        self.problems: list[str] = []
        self.states = 0
        self._api = api
        self._kept = kept
        self._lock = threading.Lock()
        self._pending: dict[str, dict[Key, tuple[int, float]]] = {"api": {}, "kubelet": {}}
        """By source: when the condition changed, and when the source reported that."""
        self._published: dict[Key, int] = {}
        self._newest: dict[Key, int] = {}
        """Of each condition of a pod that PodInfo has."""
        self._has_ended = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether PodInfo has all that the sources have reported."""
        with self._lock:
            self._settle()
            return not any(self._pending.values())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with (
            client() as follower,
            grpc.insecure_channel(
                f"unix:{SOCKET}", options=(("grpc.default_authority", "localhost"),)
            ) as kubelet,
        ):
            threads = [
                threading.Thread(target=self._follow_podinfo, args=(follower,), name="podinfo"),
                threading.Thread(target=self._follow_api, name="api"),
                threading.Thread(target=self._follow_kubelet, args=(kubelet,), name="kubelet"),
            ]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._has_ended.set()
                follower.cancel()
                kubelet.close()
                # An event ends the watch.
                path = "/api/v1/namespaces/default/pods"
                container = {"name": "any", "image": "any"}
                spec = {"nodeName": "elsewhere", "containers": [container]}
                self._api.create(path, {"metadata": {"name": _END}, "spec": spec})
                self._api.delete(f"{path}/{_END}", gracePeriodSeconds="0")
                for thread in threads:
                    thread.join(_LATE_SECONDS)

    def _follow_podinfo(self, follower: podinfo.PodInfoClient) -> None:
        for state in follower:
            with self._lock:
                self._publish(state)

    def _follow_api(self) -> None:
        while not self._has_ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException, ApiError, ValueError):
                for event in self._api.watch("/api/v1/pods", timeoutSeconds="3600"):
                    if self._has_ended.is_set():
                        return
                    pod = event["object"]
                    conditions = pod["status"].get("conditions", [])
                    times = {one["type"]: one["lastTransitionTime"] for one in conditions}
                    is_gone = event["type"] == "DELETED" or pod["spec"].get("nodeName") != NAME
                    self._report("api", pod["metadata"]["uid"], {} if is_gone else times)
            self._disconnect("api")

    def _follow_kubelet(self, channel: grpc.Channel) -> None:
        watch = channel.unary_stream(
            "/v1alpha1.Pods/WatchPods",
            request_serializer=kubelet_pb2.WatchPodsRequest.SerializeToString,
            response_deserializer=kubelet_pb2.WatchPodsEvent.FromString,
        )
        while not self._has_ended.is_set():
            # ValueError: the channel is closed.
            with contextlib.suppress(grpc.RpcError, ValueError):
                for event in watch(kubelet_pb2.WatchPodsRequest()):
                    if event.type != kubelet_pb2.INITIAL_SYNC_COMPLETE:
                        pod = pods_api_reading.read(event.pod)
                        conditions = pod.status.conditions
                        times = {one.type: one.last_transition_time for one in conditions}
                        is_gone = event.type == kubelet_pb2.DELETED
                        self._report("kubelet", pod.uid, {} if is_gone else times)
            self._disconnect("kubelet")

    def _report(self, source: str, uid: str, times: dict[str, str | None]) -> None:
        """What a source has of a pod from now on; nothing of one that is gone."""
        now = time.monotonic()
        with self._lock:
            pending = self._pending[source]
            for key in [key for key in pending if key[0] == uid and key[1] not in times]:
                del pending[key]
            for kind, text in times.items():
                changed = int(datetime.datetime.fromisoformat(text).timestamp()) if text else 0
                if self._published.get((uid, kind), -1) < changed:
                    pending.setdefault((uid, kind), (changed, now))
                    pending[uid, kind] = (changed, pending[uid, kind][1])

    def _disconnect(self, source: str) -> None:
        """Its reports may be old; it sends all again."""
        with self._lock:
            self._pending[source].clear()
        self._has_ended.wait(_RETRY_SECONDS)

    def _publish(self, state: podinfo.PodInfoState) -> None:
        self.states += 1
        missing = self._kept - {pod.pod_uid for pod in state.pods}
        if missing:
            self.problems.append(f"state {state.rev} has no {missing}")
        self._published = {
            (pod.pod_uid, one.type): one.last_transition_time.seconds
            for pod in state.pods
            for one in pod.conditions
        }
        self._compare(state)
        self._settle()

    def _compare(self, state: podinfo.PodInfoState) -> None:
        uids = {pod.pod_uid for pod in state.pods}
        self._newest = {key: newest for key, newest in self._newest.items() if key[0] in uids}
        for key, newest in self._newest.items():
            uid, kind = key
            if kind in TYPES and uid not in self._kept:
                continue  # podgate's own end with the sandbox, before the pod does
            found = self._published.get(key)
            if found is None or found < newest:
                self.problems.append(f"state {state.rev}: {key} is {found} and was {newest}")
        self._newest |= self._published

    def _settle(self) -> None:
        now = time.monotonic()
        for source, pending in self._pending.items():
            for key, (changed, reported) in list(pending.items()):
                if self._published.get(key, -1) >= changed:
                    del pending[key]
                elif now - reported > _LATE_SECONDS:
                    found = self._published.get(key)
                    self.problems.append(f"{key} of {source} is {changed}, in PodInfo {found}")
                    del pending[key]

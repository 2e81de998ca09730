"""Kubernetes Events about pods and the node (events.k8s.io/v1): one Event, then a series.

As client-go's recorder (tools/events/event_broadcaster.go): what happens again within six minutes
is the same Event, whose `series` counts; the count is written now and then, not each time. Events
are for people: one that cannot be sent soon is discarded and counted.

Failures that the kubelet reports for its own probes are left out (`kubelet_reports`).
"""

import asyncio
import dataclasses
import datetime
import hashlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from agent import backoff, labels
from agent.kube.client import MERGE, ApiClient, ApiError
from agent.kube.objects import ApiPod
from agent.logs import Event

log = structlog.get_logger(__name__)

WARNING: Final = "Warning"
NORMAL: Final = "Normal"

CONTROLLER: Final = f"{labels.DOMAIN}/agent"

# pkg/apis/core/validation/events.go
_MAX_NOTE = 1024
_MAX_REASON = 128
_MAX_INSTANCE = 128
_MAX_NAME = 253

_SAME_SECONDS = 360.0
_SERIES_SECONDS = 300.0
_FLUSH_SECONDS = 30.0
_SEND_SECONDS = 10.0
_MAX_WAITING = 1000
_TRIES = 5
# A crash loop on every pod of a node must not become the API server's load.
_PER_SECOND, _BURST = 5.0, 50

# The namespace of Events about objects without one (pkg/apis/core/validation/events.go).
_NODES_NAMESPACE = "default"

_Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Regarding:
    """The object of an Event. namespace: empty for a node; uid: empty if it is not known;
    container: empty for none."""

    kind: str
    namespace: str
    name: str
    uid: str
    container: str = ""


class _Series:
    """One Event, and how often it happened."""

    def __init__(self, key: _Key, body: dict[str, object], now: float) -> None:
        self.key = key
        self.body = body
        self.name = ""
        """The API's name of it; empty until it is sent."""
        self.count = 1
        self.sent_count = 0
        self.last = now
        self.last_at = ""
        self.sent_at = now
        self.tries = 0


class EventRecorder:
    """Sends Events about pods and this node to the API server. For the event loop."""

    def __init__(
        self,
        api: ApiClient,
        *,
        node_name: str,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self.sent = 0
        """Event requests that the API server accepted."""
        self.dropped = 0
        """Events, without repetitions, that were discarded unsent."""
        self._api = api
        self._instance = node_name[:_MAX_INSTANCE]
        # The kubelet's Events have the name for the UID, too, and kubectl describe finds both
        # (pkg/kubelet/kubelet.go, nodeRef).
        self._node = _Regarding("Node", "", node_name, node_name)
        self._now = now
        self._series: dict[_Key, _Series] = {}
        self._waiting: dict[_Key, None] = {}
        self._wake = asyncio.Event()
        self._bucket = backoff.Bucket(per_second=_PER_SECOND, burst=_BURST)
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=60.0, jitter=jitter)
        self._is_away = False

    def record(
        self,
        pod: ApiPod,
        reason: str,
        note: str,
        *,
        action: str,
        container: str = "",
        about: str = "",
        is_warning: bool = True,
    ) -> None:
        """Record an event about a pod, to be sent soon.

        :param reason: CamelCase.
        :param action: what podgate did, CamelCase, such as "Probing".
        :param container: the one concerned, if any.
        :param about: two events with this reason are one unless it differs.
        :param is_warning: its type is Warning, else Normal.
        """
        found = pod.metadata
        regarding = _Regarding("Pod", found.namespace, found.name, found.uid, container)
        self._record(regarding, reason, note, action, about, WARNING if is_warning else NORMAL)

    def record_node(self, reason: str, note: str, *, action: str) -> None:
        """As `record`, about this node; a warning."""
        self._record(self._node, reason, note, action)

    def record_namespace(self, name: str, reason: str, note: str, *, action: str) -> None:
        """As `record`, about a namespace; listed with the Events of its pods."""
        self._record(_Regarding("Namespace", name, name, ""), reason, note, action)

    def _record(
        self,
        regarding: _Regarding,
        reason: str,
        note: str,
        action: str,
        about: str = "",
        type: str = WARNING,
    ) -> None:
        # A node has several problems of one kind; a pod can have another sentence each time.
        what = f"{reason} {about}" if regarding.kind == "Pod" else f"{reason} {note}"
        key = (regarding.uid or regarding.name, regarding.container, what)
        loop_now = asyncio.get_running_loop().time()
        moment = _micro_time(self._now())
        current = self._series.get(key)
        if current and loop_now - current.last < _SAME_SECONDS:
            current.count += 1
            current.last, current.last_at = loop_now, moment
            return
        series = _Series(key, {}, loop_now)
        series.body = self._body(regarding, reason, note, action, moment, about) | {"type": type}
        series.last_at = moment
        self._series[key] = series
        self._enqueue(key)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._flush_series(), name="series of events")
            while True:
                while not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                await self._bucket.wait()
                key = next(iter(self._waiting), None)
                if key is None:
                    continue
                del self._waiting[key]
                if series := self._series.get(key):
                    await self._send(series)

    async def _flush_series(self) -> None:
        """Send counts that have grown, and forget series that are over."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            now = asyncio.get_running_loop().time()
            for key, series in list(self._series.items()):
                if key in self._waiting:
                    continue
                is_over = now - series.last >= _SAME_SECONDS
                if series.name and series.count > series.sent_count:
                    if is_over or now - series.sent_at >= _SERIES_SECONDS:
                        self._enqueue(key)
                elif is_over:
                    del self._series[key]

    def _enqueue(self, key: _Key) -> None:
        self._waiting[key] = None
        while len(self._waiting) > _MAX_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._drop(oldest)
        self._wake.set()

    async def _send(self, series: _Series) -> None:
        count = series.count
        try:
            if series.name:
                await self._patch(series, count)
            else:
                await self._create(series, count)
        except ApiError as error:
            await self._handle_error(error, series)
            return
        self._is_away = False
        self.sent += 1
        self._backoff.reset()
        series.tries = 0
        series.sent_count = count
        series.sent_at = asyncio.get_running_loop().time()

    async def _create(self, series: _Series, count: int) -> None:
        body = dict(series.body)
        if count > 1:
            body["series"] = {"count": count, "lastObservedTime": series.last_at}
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        await self._api.request(
            "POST", _path(metadata["namespace"]), body=body, timeout_seconds=_SEND_SECONDS
        )
        series.name = metadata["name"]

    async def _patch(self, series: _Series, count: int) -> None:
        metadata = series.body["metadata"]
        assert isinstance(metadata, dict)
        await self._api.request(
            "PATCH",
            f"{_path(metadata['namespace'])}/{series.name}",
            body={"series": {"count": count, "lastObservedTime": series.last_at}},
            content_type=MERGE,
            timeout_seconds=_SEND_SECONDS,
        )

    async def _handle_error(self, error: ApiError, series: _Series) -> None:
        series.tries += 1
        if series.name and error.code == 404:
            # Events exist for an hour; a series may last longer.
            series.name = ""
            self._enqueue(series.key)
            return
        if not self._is_away:
            self._is_away = True
            log.warning(Event.EVENT_NOT_SENT, error=str(error), code=error.code)
        if not error.is_transient or series.tries >= _TRIES:
            self._drop(series.key)
            return
        self._enqueue(series.key)
        await asyncio.sleep(max(error.retry_after_seconds, self._backoff.next_seconds()))

    def _drop(self, key: _Key) -> None:
        if self._series.pop(key, None):
            self.dropped += 1

    def _body(
        self, of: _Regarding, reason: str, note: str, action: str, moment: str, about: str
    ) -> dict[str, object]:
        regarding = {"apiVersion": "v1", "kind": of.kind, "name": of.name, "uid": of.uid}
        if of.namespace:
            regarding["namespace"] = of.namespace
        if of.container:
            regarding["fieldPath"] = f"spec.containers{{{of.container}}}"
        identity = f"{of.uid}/{of.container}/{reason}/{moment}{about}".encode()
        suffix = f".{hashlib.sha256(identity).hexdigest()[:16]}"
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": of.name[: _MAX_NAME - len(suffix)] + suffix,
                "namespace": of.namespace or _NODES_NAMESPACE,
            },
            "eventTime": moment,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": action,
            "reason": reason[:_MAX_REASON],
            "regarding": regarding,
            "note": _clipped(note),
        }


def _path(namespace: str) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"


def _micro_time(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _clipped(note: str) -> str:
    """Limited to what the API accepts, in bytes."""
    return note.encode()[:_MAX_NOTE].decode(errors="ignore")

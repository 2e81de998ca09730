"""Events about pods (events.k8s.io/v1), so few that they help: one, and then a series.

As client-go's events recorder (tools/events/event_broadcaster.go) does it: what happens again
within six minutes is the same event, whose `series` counts; that is written now and then and not
each time. Events are for people: what cannot be sent soon is dropped, and counted.

What the kubelet says of its own probes is not said again (`kubelet_reports`).
"""

import asyncio
import datetime
import hashlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from agent import backoff, labels
from agent.kube.client import MERGE, ApiClient, ApiError
from agent.kube.objects import ApiPod
from probes.spec.specs import PodSpec

log = structlog.get_logger(__name__)

NORMAL: Final = "Normal"
WARNING: Final = "Warning"

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

_Key = tuple[str, str, str]


class _Series:
    """One event, and how often it happened."""

    def __init__(self, key: _Key, body: dict[str, object], now: float) -> None:
        self.key = key
        self.body = body
        self.name = ""
        """As the API has it; empty until it has been sent."""
        self.count = 1
        self.sent_count = 0
        self.last = now
        self.last_at = ""
        self.sent_at = now
        self.tries = 0


class EventRecorder:
    """Tells the API server what happens to pods. To be used on the event loop."""

    def __init__(
        self,
        api: ApiClient,
        *,
        node_name: str,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self.sent = 0
        """How many requests about events were taken."""
        self.dropped = 0
        """How many events, not counting repetitions, were never told."""
        self._api = api
        self._instance = node_name[:_MAX_INSTANCE]
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
        type: str = WARNING,
        container: str = "",
    ) -> None:
        """Something happened to a pod. reason: CamelCase; action: what podgate did, CamelCase, as
        "Probing"; container: the one that it is about, if it is about one."""
        key = (pod.metadata.uid, container, reason)
        loop_now = asyncio.get_running_loop().time()
        moment = _micro_time(self._now())
        known = self._series.get(key)
        if known and loop_now - known.last < _SAME_SECONDS:
            known.count += 1
            known.last, known.last_at = loop_now, moment
            return
        series = _Series(key, {}, loop_now)
        series.body = self._body(pod, reason, note, action, type, container, moment)
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
        """Send counts that have grown, and forget what has not happened for long."""
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
            # Events live for an hour; a series may be longer.
            series.name = ""
            self._enqueue(series.key)
            return
        if not self._is_away:
            self._is_away = True
            log.warning("an event could not be told", error=str(error), code=error.code)
        if not error.is_transient or series.tries >= _TRIES:
            self._drop(series.key)
            return
        self._enqueue(series.key)
        await asyncio.sleep(max(error.retry_after_seconds, self._backoff.next_seconds()))

    def _drop(self, key: _Key) -> None:
        if self._series.pop(key, None):
            self.dropped += 1

    def _body(
        self,
        pod: ApiPod,
        reason: str,
        note: str,
        action: str,
        type: str,
        container: str,
        moment: str,
    ) -> dict[str, object]:
        metadata = pod.metadata
        regarding = {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        }
        if container:
            regarding["fieldPath"] = f"spec.containers{{{container}}}"
        identity = f"{metadata.uid}/{container}/{reason}/{moment}".encode()
        suffix = f".{hashlib.sha256(identity).hexdigest()[:16]}"
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": metadata.name[: _MAX_NAME - len(suffix)] + suffix,
                "namespace": metadata.namespace,
            },
            "eventTime": moment,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": action,
            "reason": reason[:_MAX_REASON],
            "regarding": regarding,
            "note": _clipped(note),
            "type": type,
        }


def kubelet_reports(spec: PodSpec, container: str, probe: str) -> bool:
    """Whether the kubelet runs the very probe that podgate runs, and so tells of its failures.

    probe: "startup", "readiness" or "liveness".
    """
    running = next((one for one in spec.containers if one.name == container), None)
    base = next((one for one in spec.base if one.name == container), None)
    if running is None or base is None:
        return False
    return getattr(running, probe) is not None and getattr(running, probe) == getattr(base, probe)


def _path(namespace: str) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"


def _micro_time(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _clipped(note: str) -> str:
    """No more than the API takes, which counts bytes."""
    return note.encode()[:_MAX_NOTE].decode(errors="ignore")

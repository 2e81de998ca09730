"""A resilient watch of one API resource: lists, watches, and recovers from errors.

It lists (or, if the server can, opens one stream that begins with all objects: KEP-3157), then
watches from there until cancelled. Failures:

* The stream ends, breaks, or is silent for longer than the interval of bookmarks: watch again from
  the last version. Silence never causes a new list: servers with an old etcd send no bookmarks.
* 410, as an HTTP status or as an ERROR event: the server has forgotten the changes since then. List
  again, and report only what differs. 410 for the list itself: list the newest.
* 504 with ResourceVersionTooLarge: this server is behind the previous one, or etcd was restored
  from a backup; list the newest.
* 404 for an optional resource: it has no objects. Retried about once a minute, as after 403, since
  the resource may be installed, or the permission be granted.
* Other errors: the same request again, with back-off; Retry-After is respected, up to a minute.
* Duplicate and late events are recognised by their resource version and ignored.

client-go's reflector.go is the model for the order of requests.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from agent import backoff
from agent.kube import lists, objects, responses
from agent.kube.client import JSON, ApiClient, ApiError
from agent.logs import Event

log = structlog.get_logger(__name__)

ObjectT = TypeVar("ObjectT", bound=objects.ApiObject)

# Bookmarks come about once a minute.
_SILENCE_SECONDS: Final = 70.0
# client-go's minWatchTimeout is 5 minutes, up to twice that: clients change servers one by one.
_SERVER_TIMEOUT_SECONDS: Final = 300
# A stream without events that ended sooner is a failure, not a server that closes idle streams.
_SHORTEST_STREAM_SECONDS: Final = 5.0
_INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"
# People change this, rarely; with 5,000 nodes these are 80 small responses per second.
_LASTING_SECONDS: Final = 60.0
# Errors that do not show whether the server can stream lists.
_UNRELATED_TO_STREAMING: Final = (0, 401, 403, 404, 410, 429, 503)
_MAX_DELETED: Final = 1024

# The server rejects the object's kind for a list (406), and answers a watch that names the list's
# kind with an empty stream.
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_METADATA_WATCH: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

_Key = tuple[str, str]


class Query(msgspec.Struct, Generic[ObjectT], frozen=True):
    """The resource to watch."""

    name: str
    """For log lines and metrics: "pods"."""
    path: str
    """As in "/api/v1/pods"."""
    kind: type[ObjectT]
    field_selector: str = ""
    is_metadata_only: bool = False
    may_be_absent: bool = False
    """Whether the server may lack this resource, such as a custom one."""
    on_read: Callable[[ObjectT, bytes], None] | None = None
    """Gets each decoded object and its JSON, before `on_change` gets the object."""


class Watcher(Generic[ObjectT]):
    """Keeps `objects` as the API server has them, and reports each change once."""

    def __init__(
        self,
        api: ApiClient,
        query: Query[ObjectT],
        *,
        on_change: Callable[[ObjectT | None, ObjectT | None], None],
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """on_change: gets the object before and after; None if it did not or does not exist.

        An object that replaces another of its name is reported as a removal and an addition.
        """
        self.query = query
        self.objects: dict[_Key, ObjectT] = {}
        self.synced = asyncio.Event()
        """Set when all objects have been received once."""
        self.answered = asyncio.Event()
        """Set when `synced` is, or when the resource is unavailable for now."""
        self.is_absent = False
        """Whether the server lacks this resource."""
        self.problem = ""
        """The last error; empty while the watch works."""
        self.received_at: float | None = None
        """When the server last sent something, by the event loop's clock; bookmarks come about once
        a minute. None: never."""
        self.requests = 0
        self._api = api
        self._on_change = on_change
        self._jitter = jitter
        self._version = ""
        self._is_current = False
        """Whether `objects` are those of `_version`, so that no list is needed."""
        self._needs_newest = False
        self._may_stream = True
        self._deleted: dict[str, str] = {}
        """Versions at which the objects with these uids were deleted."""
        # Under one a second in the long run, but a list and its watch at once.
        self._bucket = backoff.Bucket(per_second=0.8, burst=2)
        self._backoff = backoff.Backoff(base_seconds=1.0, cap_seconds=30.0, jitter=jitter)

    def seed(self, found: list[ObjectT], version: str) -> None:
        """Start with these objects, which are not reported. Call it before `run`."""
        self.objects = {_key(item): item for item in found}
        self._version = version

    @property
    def version(self) -> str:
        """The newest resource version received, for `seed`."""
        return self._version

    async def run(self) -> None:
        """Follow the resource until cancelled."""
        while True:
            await self._bucket.wait()
            self.requests += 1
            try:
                if self._is_current:
                    await self._watch()
                elif self._may_stream:
                    await self._stream_list()
                else:
                    await self._list()
            except ApiError as error:
                wait = error.retry_after_seconds * (1.0 + 0.1 * self._jitter())
                wait = max(wait, self._backoff.next_seconds())
                if self.query.may_be_absent and error.code in (403, 404):
                    wait = max(wait, _LASTING_SECONDS * (0.5 + self._jitter()))
                if self.query.may_be_absent and error.code == 404:
                    self._handle_not_found()
                else:
                    self._handle_error(error)
                await asyncio.sleep(wait)

    def _handle_not_found(self) -> None:
        """The resource has no objects. A server that is starting may respond so once: the current
        objects are removed at the second 404."""
        if not self.is_absent:
            log.info(Event.RESOURCE_NOT_SERVED, resource=self.query.name)
        if self.is_absent or not self.objects:
            self._replace_all([], "")
        self._mark_healthy()
        self.is_absent = True
        self._is_current = False

    def _handle_error(self, error: ApiError) -> None:
        """Log a failure, and choose the next request."""
        if not self.problem:
            resource = self.query.name
            log.warning(
                Event.WATCH_INTERRUPTED, resource=resource, error=str(error), code=error.code
            )
        self.problem = str(error)
        if error.is_transient or error.code == 403:
            self.answered.set()
        if error.code == 410:
            self._needs_newest = not self._is_current
            self._is_current = False
        elif responses.is_too_large(error):
            self._needs_newest = True
            self._is_current = False

    def _mark_healthy(self) -> None:
        self._backoff.reset()
        if self.problem:
            log.info(Event.WATCH_RESUMED, resource=self.query.name)
            self.problem = ""

    @contextlib.asynccontextmanager
    async def _healthy_while_open(self, *, is_current: bool) -> AsyncIterator[None]:
        """A stream of changes that stays open is healthy, though nothing changes and the next
        bookmark comes in a minute. is_current: whether it is one, and no list."""
        if not is_current:
            yield
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_SHORTEST_STREAM_SECONDS, self._mark_healthy)
        try:
            yield
        finally:
            timer.cancel()

    async def _list(self) -> None:
        query = self._query()
        # From the server's cache: at first any version, later none older than what was received.
        query["resourceVersion"] = "" if self._needs_newest else self._version or "0"
        found: list[ObjectT] = []

        def add(item: bytes) -> None:
            if read := self._read(item):
                found.append(read)
            elif not responses.is_json(item):
                # The others may be all, and objects that a list lacks count as deleted.
                raise ApiError("the API server's list cannot be decoded: it is not JSON")

        version = await lists.read(
            self._api,
            self.query.path,
            query=query,
            accept=_METADATA_LIST if self.query.is_metadata_only else JSON,
            on_item=add,
        )
        self._replace_all(found, version)

    async def _stream_list(self) -> None:
        """List and watch in one request, or detect that this server cannot."""
        query = self._watch_query("" if self._needs_newest else self._version)
        query["sendInitialEvents"] = "true"
        query["resourceVersionMatch"] = "NotOlderThan"
        try:
            await self._follow(query, initial=[])
        except ApiError as error:
            is_unrelated = error.code in _UNRELATED_TO_STREAMING or responses.is_too_large(error)
            if not self._is_current and not is_unrelated:
                self._may_stream = False
            raise
        if not self._is_current:
            self._may_stream = False
            raise ApiError("the stream ended before the list was complete")

    async def _watch(self) -> None:
        await self._follow(self._watch_query(self._version), initial=None)

    async def _follow(self, query: dict[str, str], *, initial: list[ObjectT] | None) -> None:
        """Apply a stream's events until it ends. Raises `ApiError`.

        initial: collects the events before the bookmark that ends the list.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        has_events = False
        async with (
            self._api.stream(
                self.query.path,
                query=query,
                accept=_METADATA_WATCH if self.query.is_metadata_only else JSON,
                silence_seconds=_SILENCE_SECONDS * (1.0 + 0.1 * self._jitter()),
            ) as lines,
            self._healthy_while_open(is_current=initial is None),
        ):
            async for line in lines:
                self.received_at = loop.time()
                try:
                    event = responses.decode(line, responses.WatchEvent)
                except msgspec.DecodeError as error:
                    raise ApiError(f"the API server's event cannot be decoded: {error}") from error
                if event.type == "ERROR":
                    raise ApiError.of_status(responses.status(event.object))
                has_events = True
                if initial is None:
                    self._mark_healthy()
                    self._apply(event)
                elif event.type != "BOOKMARK":
                    if item := self._read(event.object):
                        initial.append(item)
                else:
                    bookmark = responses.decode_partial(event.object)
                    if bookmark and (bookmark.annotations or {}).get(_INITIAL_EVENTS_END) == "true":
                        self._replace_all(initial, bookmark.resource_version)
                        self._mark_healthy()
                        initial = None
        if has_events:
            return
        if loop.time() - started < _SHORTEST_STREAM_SECONDS:
            raise ApiError("the watch ended as soon as it started")
        if initial is None:
            self._mark_healthy()

    def _query(self) -> dict[str, str]:
        if not self.query.field_selector:
            return {}
        return {"fieldSelector": self.query.field_selector}

    def _watch_query(self, version: str) -> dict[str, str]:
        seconds = int(_SERVER_TIMEOUT_SECONDS * (1.0 + self._jitter()))
        return {
            **self._query(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }

    def _read(self, raw: bytes | msgspec.Raw) -> ObjectT | None:
        """The object; its previous version if it cannot be decoded, or None."""
        try:
            found = responses.decode(raw, self.query.kind)
        except msgspec.DecodeError as error:
            partial = responses.decode_partial(raw)
            log.warning(
                Event.OBJECT_INVALID,
                resource=self.query.name,
                object=f"{partial.namespace}/{partial.name}" if partial else "",
                error=str(error),
            )
            return self.objects.get((partial.namespace, partial.name)) if partial else None
        if self.query.on_read:
            self.query.on_read(found, bytes(raw))
        return found

    def _apply(self, event: responses.WatchEvent) -> None:
        if event.type == "BOOKMARK":
            if bookmark := responses.decode_partial(event.object):
                self._version = bookmark.resource_version or self._version
            return
        new = self._read(event.object)
        if new is None:
            return
        key, version = _key(new), new.metadata.resource_version
        old = self.objects.get(key)
        if not objects.is_not_newer(version, self._version):
            self._version = version
        if event.type == "DELETED":
            self._mark_deleted(new.metadata.uid, version)
            if old and old.metadata.uid == new.metadata.uid:
                del self.objects[key]
                self._on_change(old, None)
            return
        deleted_at = self._deleted.get(new.metadata.uid)
        if deleted_at is not None and objects.is_not_newer(version, deleted_at):
            return
        if old and objects.is_not_newer(version, old.metadata.resource_version):
            return
        self._put(key, old, new)

    def _replace_all(self, found: list[ObjectT], version: str) -> None:
        """Replace all objects by a list, and report what differs."""
        self._version = version
        self._is_current, self._needs_newest = True, False
        self.is_absent = False
        self._deleted.clear()
        listed = {_key(item): item for item in found}
        for key in self.objects.keys() - listed.keys():
            self._on_change(self.objects.pop(key), None)
        for key, new in listed.items():
            old = self.objects.get(key)
            if old is None or old.metadata.resource_version != new.metadata.resource_version:
                self._put(key, old, new)
        self.synced.set()
        self.answered.set()

    def _put(self, key: _Key, old: ObjectT | None, new: ObjectT) -> None:
        if old and old.metadata.uid != new.metadata.uid:
            self._mark_deleted(old.metadata.uid, new.metadata.resource_version)
            del self.objects[key]
            self._on_change(old, None)
            old = None
        self.objects[key] = new
        self._on_change(old, new)

    def _mark_deleted(self, uid: str, version: str) -> None:
        self._deleted[uid] = version
        while len(self._deleted) > _MAX_DELETED:
            del self._deleted[next(iter(self._deleted))]


def _key(item: objects.ApiObject) -> _Key:
    return item.metadata.namespace, item.metadata.name

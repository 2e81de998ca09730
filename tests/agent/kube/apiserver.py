"""An API server of the tests' own: real HTTP over real sockets, with faults on demand.

It answers as the recordings beside it show; what they do not show it does not do. It listens on a
unix socket: what is written there is there to be read at once, while packets on the loopback may
wait for a busy machine, and faked time would not wait for them.
"""

import asyncio
import copy
import json
import pathlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

RECORDED = pathlib.Path(__file__).parent / "recorded"
PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
NAMESPACES = "/api/v1/namespaces"

Json = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def recorded(name: str) -> Any:
    """What the real one answered."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def recorded_response(name: str) -> web.Response:
    """A whole recorded response."""
    text = (RECORDED / "metadata" / f"{name}.http").read_text(encoding="utf-8")
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    status = int(head.split()[1])
    return web.Response(status=status, text=body, content_type="application/json")


def _prefers(request: web.Request, kind: str) -> bool:
    """Whether the first media type that the client accepts is this kind of metadata."""
    return f"as={kind};" in request.headers["Accept"].split(",")[0]


@dataclass
class RecordedRequest:
    """One request, and the event loop's time of it."""

    at: float
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def is_streamed_list(self) -> bool:
        return self.query.get("sendInitialEvents") == "true"


@dataclass
class Stream:
    """One watch that is being served."""

    path: str
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    transport: asyncio.Transport | None = None
    is_hung: bool = False

    def send(self, line: bytes) -> None:
        if not self.is_hung:
            self.lines.put_nowait(line)

    def end(self) -> None:
        """End as a server does whose time is up."""
        self.lines.put_nowait(None)

    async def cut(self, half: bytes = b"") -> None:
        """Break the connection, after half an event."""
        self.lines.put_nowait(half)
        await asyncio.sleep(0.01)
        assert self.transport is not None
        self.transport.abort()

    def hang(self) -> None:
        """Send nothing more and keep the connection open, like a peer whose FIN was lost."""
        self.is_hung = True


class ApiServer:
    """Objects by path and name, each change a resource version, watches that follow."""

    def __init__(self) -> None:
        self.received: list[RecordedRequest] = []
        self.streams: list[Stream] = []
        self.can_stream_lists = True
        self.sends_bookmarks = True
        self.oldest_version = 0
        """Watches from before it are 410."""
        self.faults: list[Fault] = []
        """Called first, in order; the first response is sent."""
        self.port = 0
        self._objects: dict[str, dict[tuple[str, str], Json]] = {}
        self._history: list[tuple[str, int, Json]] = []
        self._version = 100
        self._began = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    def put(self, thing: Json, *, path: str = PODS) -> Json:
        """Add an object, or another version of it."""
        thing = copy.deepcopy(thing)
        metadata = thing["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        objects = self._objects.setdefault(path, {})
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        kind = "MODIFIED" if key in objects else "ADDED"
        objects[key] = thing
        self._publish(path, {"type": kind, "object": thing})
        return thing

    def delete(self, name: str, *, namespace: str = "default", path: str = PODS) -> None:
        thing = copy.deepcopy(self._objects[path].pop((namespace, name)))
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._publish(path, {"type": "DELETED", "object": thing})

    def get(self, name: str, *, namespace: str = "default", path: str = PODS) -> Json:
        return self._objects[path][(namespace, name)]

    def forbid(self, path: str) -> None:
        """Reject lists and watches of these objects, as without the right to them."""

        async def reject(request: web.Request) -> web.StreamResponse | None:
            return error_response(403, "Forbidden") if request.path == path else None

        self.faults.append(reject)

    def silently(self, change: Callable[[], Any]) -> None:
        """A change that no watch reports, as during an outage."""
        streams, self.streams = self.streams, []
        change()
        self.streams = streams

    def of(self, path: str = PODS, *, method: str = "GET") -> list[RecordedRequest]:
        return [one for one in self.received if one.path == path and one.method == method]

    def patches(self) -> list[RecordedRequest]:
        return [one for one in self.received if one.method == "PATCH"]

    def stream(self, path: str = PODS) -> Stream:
        """The newest watch of a resource."""
        return [one for one in self.streams if one.path == path][-1]

    async def watched(self, path: str = PODS, *, count: int = 1) -> Stream:
        """Wait until this number of watches of a resource has been opened since the start."""
        while sum(1 for one in self.of(path) if one.is_watch) < count or not any(
            one.path == path for one in self.streams
        ):
            self._began.clear()
            await self._began.wait()
        return self.stream(path)

    def bookmark(self, path: str = PODS) -> None:
        self.stream(path).send(self._bookmark(path))

    @asynccontextmanager
    async def running(
        self,
        path: pathlib.Path | None = None,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator[None]:
        """Serve on a unix socket, or on a port of 127.0.0.1 (0: any)."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        try:
            site: web.BaseSite
            if path:
                site = web.UnixSite(runner, path)
            else:
                site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
            await site.start()
            if not path:
                self.port = runner.addresses[0][1]
            yield
        finally:
            for stream in self.streams:
                stream.end()
            await runner.cleanup()

    def _publish(self, path: str, event: Json) -> None:
        self._history.append((path, self._version, copy.deepcopy(event)))
        for stream in self.streams:
            if stream.path == path:
                stream.send(line(event))

    def _bookmark(self, path: str, *, ends_list: bool = False) -> bytes:
        metadata: Json = {"resourceVersion": str(self._version)}
        if ends_list:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        return line({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        self.received.append(
            RecordedRequest(
                at=asyncio.get_running_loop().time(),
                method=request.method,
                path=request.path,
                query=dict(request.query),
                headers=dict(request.headers),
                body=json.loads(content) if content else None,
            )
        )
        for fault in self.faults:
            if (answer := await fault(request)) is not None:
                return answer
        if request.method == "PATCH" and request.path.endswith("/status"):
            return self._patch(request, json.loads(content))
        if request.method in ("POST", "PATCH"):
            return web.json_response(
                json.loads(content), status=201 if request.method == "POST" else 200
            )
        if request.query.get("watch") == "true":
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        if _prefers(request, "PartialObjectMetadata"):
            return recorded_response("list-accept-object")
        if int(request.query["resourceVersion"] or 0) > self._version:
            return too_large(int(request.query["resourceVersion"]), self._version)
        items = list(self._objects.get(request.path, {}).values())
        return web.json_response(
            {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if _prefers(request, "PartialObjectMetadataList"):
            return response  # recorded/metadata/watchlist-accept-list-first.http
        assert request.transport is not None
        stream = Stream(request.path, transport=request.transport)
        since = int(request.query["resourceVersion"] or 0)
        if request.query.get("sendInitialEvents"):
            if not self.can_stream_lists:
                await response.write(line(recorded("watchlist")[0]))
                return response
            for thing in self._objects.get(request.path, {}).values():
                stream.send(line({"type": "ADDED", "object": thing}))
            stream.send(self._bookmark(request.path, ends_list=True))
        elif since < self.oldest_version:
            await response.write(line(recorded("watch-too-old")[0]))
            return response
        else:
            for path, version, event in self._history:
                if path == request.path and version > since:
                    stream.send(line(event))
        self.streams.append(stream)
        self._began.set()
        try:
            while (text := await stream.lines.get()) is not None:
                await response.write(text)
        except ConnectionError:
            pass
        finally:
            if stream in self.streams:
                self.streams.remove(stream)
        return response

    def _patch(self, request: web.Request, patch: Json) -> web.Response:
        _, _, _, _, namespace, _, name, _ = request.path.split("/")
        thing = self._objects[PODS].get((namespace, name))
        if thing is None:
            return as_recorded("patch-404")
        if patch["metadata"]["uid"] != thing["metadata"]["uid"]:
            return as_recorded("patch-wrong-uid")
        changed = copy.deepcopy(thing)
        conditions = {one["type"]: one for one in changed["status"].get("conditions", [])}
        for one in patch["status"]["conditions"]:
            if one.get("$patch") == "delete":
                conditions.pop(one["type"], None)
                continue
            conditions.setdefault(one["type"], {}).update(one)
        changed["status"]["conditions"] = list(conditions.values())
        if changed != thing:
            changed = self.put(changed)
        return web.json_response(changed)


def line(event: Json) -> bytes:
    """One event as a line of a stream."""
    return json.dumps(event).encode() + b"\n"


def as_recorded(name: str) -> web.Response:
    answer = recorded(name)
    return web.json_response(answer["body"], status=answer["http"])


def error_response(code: int, reason: str, *, retry_after: int | None = None) -> web.Response:
    """A Status as the recorded ones, with another code."""
    body = {"kind": "Status", "status": "Failure", "message": reason, "code": code}
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return web.json_response({**body, "reason": reason}, status=code, headers=headers)


def too_large(asked: int, version: int) -> web.Response:
    """apimachinery's NewTooLargeResourceVersionError."""
    return web.json_response(
        {
            "kind": "Status",
            "status": "Failure",
            "message": f"Too large resource version: {asked}, current: {version}",
            "reason": "Timeout",
            "details": {"causes": [{"reason": "ResourceVersionTooLarge"}], "retryAfterSeconds": 1},
            "code": 504,
        },
        status=504,
    )


def pod(name: str, *, uid: str = "", namespace: str = "default", **metadata: Any) -> Json:
    """A small pod of this node."""
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "generation": 1,
            **metadata,
        },
        "spec": {"nodeName": "node1", "containers": [{"name": "app", "image": "example"}]},
        "status": {"phase": "Running"},
    }


def gated(name: str, *, uid: str = "", **metadata: Any) -> Json:
    """A pod with both of podgate's readiness gates."""
    made = pod(name, uid=uid, **metadata)
    made["spec"]["readinessGates"] = [
        {"conditionType": "podgate.io/isolation-ready"},
        {"conditionType": "podgate.io/probes-passing"},
    ]
    return made

"""Client of the Conditions API: a node agent's conditions of pods. Needs grpcio and protobuf only.

A complete program, for processes that the ConditionOwner gpu.example.com names:

    from podgate_client import conditions

    with conditions.ConditionPublisher("gpu.example.com") as publisher:
        publisher.set(pod_uid, "healthy", "True", "SelfTestPassed")
        publisher.complete()
        ...

The publisher holds what was set, and reports it again when podgate or the connection comes back.
"""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import grpc

from . import base
from .v1alpha1 import conditions_pb2 as pb

DEFAULT_TARGET = "unix:///run/podgate/conditions/conditions.sock"
SERVICE = "podgate.conditions.v1alpha1.Conditions"
_PUBLISH = f"/{SERVICE}/Publish"

_OK = 0
_ABORTED = grpc.StatusCode.ABORTED.value[0]
_CODES = {code.value[0]: code for code in grpc.StatusCode}

_Key = tuple[str, str]
"""The uid of a pod and the type of a condition."""


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A report that podgate rejected, with a sentence why. It is not repeated."""

    pod_uid: str
    type: str
    code: grpc.StatusCode
    message: str


@dataclasses.dataclass(frozen=True)
class Handlers:
    """Callbacks of a program; called on the publisher's thread or event loop.

    on_problem: one sentence when podgate cannot be reached, or rejects the owner; the publisher
    retries by itself. on_rejected: of one report. on_reset: a pod's uid and a type, when the pod
    has another sandbox: the condition is False until the program has checked it and sets it again.
    """

    on_problem: Callable[[str], None] = lambda problem: None
    on_rejected: Callable[[Rejection], None] = lambda rejection: None
    on_reset: Callable[[str, str], None] = lambda pod_uid, kind: None


class _Reports:
    """What an owner has reported, and what of it is in flight; without I/O."""

    def __init__(self, owner: str, handlers: Handlers) -> None:
        self._owner = owner
        self._handlers = handlers
        self._conditions: dict[_Key, pb.Condition] = {}
        self._in_flight: dict[int, _Key] = {}
        self._number = 0
        self._is_complete = False
        self._is_open = False

    def first_requests(self) -> Iterator[pb.PublishRequest]:
        """The first requests of a stream: all that was reported."""
        self._in_flight.clear()
        yield self._request(open=pb.Open(owner=self._owner))
        for key, condition in self._conditions.items():
            yield self._request(key, set=condition)
        if self._is_complete:
            yield self._request(complete=pb.Complete())

    def end(self) -> None:
        """The stream has ended. What is in flight may have arrived; of which sandbox is unknown."""
        if self._is_open:
            for key in self._in_flight.values():
                if condition := self._conditions.get(key):
                    condition.is_repeated = not condition.sandbox
        self._is_open = False

    def set(self, condition: pb.Condition) -> pb.PublishRequest:
        if "/" not in condition.type:
            condition.type = f"{self._owner}/{condition.type}"
        key = condition.pod_uid, condition.type
        self._conditions[key] = condition
        return self._request(key, set=condition)

    def remove(self, pod_uid: str, kind: str) -> pb.PublishRequest:
        kind = kind if "/" in kind else f"{self._owner}/{kind}"
        self._conditions.pop((pod_uid, kind), None)
        return self._request(remove=pb.Remove(pod_uid=pod_uid, type=kind))

    def complete(self) -> pb.PublishRequest:
        self._is_complete = True
        return self._request(complete=pb.Complete())

    def read(self, response: pb.PublishResponse) -> Callable[[], None] | None:
        """Handle a response; returns the call of a handler that is due."""
        self._is_open = True
        if response.HasField("reset"):
            return self._reset((response.reset.pod_uid, response.reset.type))
        key = self._in_flight.pop(response.number, None)
        if key is None or key in self._in_flight.values():
            # Not a report, or a later one of it is under way.
            return None
        if response.code == _OK:
            if condition := self._conditions.get(key):
                condition.sandbox, condition.is_repeated = response.sandbox, False
            return None
        if response.code == _ABORTED:
            return self._reset(key)
        self._conditions.pop(key, None)
        code = _CODES.get(response.code, grpc.StatusCode.UNKNOWN)
        rejection = Rejection(*key, code, response.message)
        return lambda: self._handlers.on_rejected(rejection)

    def _reset(self, key: _Key) -> Callable[[], None] | None:
        if key in self._in_flight.values():
            return None
        self._conditions.pop(key, None)
        return lambda: self._handlers.on_reset(*key)

    def _request(self, key: _Key | None = None, **action: Any) -> pb.PublishRequest:
        self._number += 1
        if key:
            self._in_flight[self._number] = key
        return pb.PublishRequest(number=self._number, **action)


class _Problem:
    """Reports a problem once, until it is over."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._text = ""

    def failed(self, error: grpc.RpcError | None) -> None:
        text = "the stream has ended"
        if error is not None:
            text = " ".join((error.details() or error.code().name).split())
        if text != self._text:
            self._text = text
            self._handlers.on_problem(f"cannot publish conditions: {text}")

    def over(self) -> None:
        self._text = ""


def _condition(pod_uid: str, kind: str, status: str, reason: str, message: str) -> pb.Condition:
    return pb.Condition(pod_uid=pod_uid, type=kind, status=status, reason=reason, message=message)


class ConditionPublisher:
    """Reports conditions from a thread of its own. All methods may be called from any thread."""

    def __init__(
        self,
        owner: str,
        target: str = "",
        *,
        handlers: Handlers | None = None,
        error_delay_seconds: float = base.ERROR_DELAY_SECONDS,
    ) -> None:
        """
        :param owner: name of the ConditionOwner, which is the domain of the types.
        :param target: as gRPC writes it; podgate's socket if empty.
        :param error_delay_seconds: between attempts, half to one and a half times as long.
        """
        handlers = handlers or Handlers()
        self._reports = _Reports(owner, handlers)
        self._problem = _Problem(handlers)
        self._error_delay_seconds = error_delay_seconds
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[pb.PublishRequest | None] | None = None
        self._call: Any = None
        self._closed = threading.Event()
        self._channel = grpc.insecure_channel(target or DEFAULT_TARGET, options=base.OPTIONS)
        self._thread = threading.Thread(target=self._run, name="podgate conditions", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, pod_uid: str, kind: str, status: str, reason: str, message: str = "") -> None:
        """Report a condition: now, or once podgate runs. kind: the type, or its part behind the
        slash; status: True, False or Unknown."""
        condition = _condition(pod_uid, kind, status, reason, message)
        with self._lock:
            self._send(self._reports.set(condition))

    def remove(self, pod_uid: str, kind: str) -> None:
        """The condition no longer exists. For a deleted pod, it only frees memory here."""
        with self._lock:
            self._send(self._reports.remove(pod_uid, kind))

    def complete(self) -> None:
        """All conditions have been set: podgate removes those that an earlier process of the owner
        had set and this one has not."""
        with self._lock:
            self._send(self._reports.complete())

    def close(self) -> None:
        """End the session. The conditions stay for `staleAfterSeconds`."""
        self._closed.set()
        with self._lock:
            call = self._call
            self._send(None)
        if call is not None:
            call.cancel()
        self._thread.join()
        self._channel.close()

    def _send(self, request: pb.PublishRequest | None) -> None:
        if self._requests is not None:
            self._requests.put(request)

    def _run(self) -> None:
        publish = self._channel.stream_stream(
            _PUBLISH,
            request_serializer=pb.PublishRequest.SerializeToString,
            response_deserializer=pb.PublishResponse.FromString,
        )
        while not self._closed.is_set():
            requests: queue.SimpleQueue[pb.PublishRequest | None] = queue.SimpleQueue()
            with self._lock:
                for request in self._reports.first_requests():
                    requests.put(request)
                self._requests = requests
                self._call = call = publish(iter(requests.get, None))
            error = None
            try:
                if self._closed.is_set():
                    call.cancel()
                for response in call:
                    self._problem.over()
                    with self._lock:
                        notify = self._reports.read(response)
                    if notify:
                        notify()
            except grpc.RpcError as found:
                error = found
            requests.put(None)
            with self._lock:
                self._reports.end()
            if not self._closed.is_set():
                self._problem.failed(error)
                self._closed.wait(base.delay_seconds(self._error_delay_seconds))


class AsyncConditionPublisher:
    """The same on the event loop that creates it: `run` reports until it is cancelled, and the
    other methods never wait."""

    def __init__(
        self,
        owner: str,
        target: str = "",
        *,
        handlers: Handlers | None = None,
        error_delay_seconds: float = base.ERROR_DELAY_SECONDS,
    ) -> None:
        """As `ConditionPublisher`."""
        handlers = handlers or Handlers()
        self._reports = _Reports(owner, handlers)
        self._problem = _Problem(handlers)
        self._error_delay_seconds = error_delay_seconds
        self._target = target or DEFAULT_TARGET
        self._requests: asyncio.Queue[pb.PublishRequest | None] = asyncio.Queue()

    def set(self, pod_uid: str, kind: str, status: str, reason: str, message: str = "") -> None:
        """As `ConditionPublisher.set`."""
        condition = _condition(pod_uid, kind, status, reason, message)
        self._requests.put_nowait(self._reports.set(condition))

    def remove(self, pod_uid: str, kind: str) -> None:
        """As `ConditionPublisher.remove`."""
        self._requests.put_nowait(self._reports.remove(pod_uid, kind))

    def complete(self) -> None:
        """As `ConditionPublisher.complete`."""
        self._requests.put_nowait(self._reports.complete())

    async def run(self) -> None:
        """Report until cancelled, through all errors."""
        async with grpc.aio.insecure_channel(self._target, options=base.OPTIONS) as channel:
            publish = channel.stream_stream(
                _PUBLISH,
                request_serializer=pb.PublishRequest.SerializeToString,
                response_deserializer=pb.PublishResponse.FromString,
            )
            while True:
                # What waits in the old queue is among this stream's first requests.
                self._requests = asyncio.Queue()
                for request in self._reports.first_requests():
                    self._requests.put_nowait(request)
                error = None
                call = publish(_taken(self._requests))
                try:
                    async for response in call:
                        self._problem.over()
                        if notify := self._reports.read(response):
                            notify()
                except grpc.RpcError as found:
                    error = found
                finally:
                    call.cancel()
                    # When the server ends the stream, gRPC lets its task wait for more of these.
                    self._requests.put_nowait(None)
                    self._reports.end()
                self._problem.failed(error)
                await asyncio.sleep(base.delay_seconds(self._error_delay_seconds))


async def _taken(
    requests: asyncio.Queue[pb.PublishRequest | None],
) -> AsyncIterator[pb.PublishRequest]:
    with contextlib.suppress(asyncio.CancelledError):
        while (request := await requests.get()) is not None:
            yield request

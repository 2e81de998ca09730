"""The gRPC connection to a container runtime, which is replaced where it loses requests.

After sendmsg(2) failed with ENOBUFS, by which the kernel reports that it has no memory, a request
to a runtime that responds can wait for its whole deadline, also one that is sent later, and some do
not even end at their deadline (seen with grpcio 1.85). Presumably gRPC waits until the socket is
writable again, which an edge-triggered epoll does not report for one that always was. So deadlines
are the event loop's as well.
"""

import asyncio
import functools
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

T = TypeVar("T")

_OPTIONS = (
    # As the kubelet's (cri-client, pkg/remote_runtime.go: maxMsgSize): lists of big nodes.
    ("grpc.max_receive_message_length", 16 << 20),
    # By default grpcio waits up to two minutes before it tries a restarted runtime again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The timeout of one attempt, in spite of its name: a busy runtime accepts slowly.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Otherwise all channels of a process to one socket share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Go's servers reject a path as a host name.
    ("grpc.default_authority", "localhost"),
)

# Of a call's time. A list takes milliseconds.
_FIRST_SHARE = 0.3

# After its deadline, for gRPC to end a call over a new connection.
_STUCK_SECONDS = 2.0

# A silent stream is opened again after this: its peer may have vanished without closing it.
_STREAM_SECONDS = 600.0

Metadata = tuple[tuple[str, str], ...]


class LostError(Exception):
    """No response came in time, or the connection was replaced meanwhile."""


class StuckError(Exception):
    """gRPC did not end a call over a new connection at its deadline."""


class RuntimeConnection:
    """One channel at a time. Calls must only read: a request that gets no response in 30 % of a
    call's time is sent again over another connection."""

    def __init__(self, socket: pathlib.Path, *, call_seconds: float) -> None:
        self._socket = socket
        self._first_seconds = call_seconds * _FIRST_SHARE
        self._second_seconds = call_seconds - self._first_seconds
        self._channel = self._open()

    async def aclose(self) -> None:
        await self._channel.close()

    async def call(
        self, path: str, request: Any, response: type[T], *, metadata: Metadata | None = None
    ) -> T:
        """Raises `grpc.aio.AioRpcError`, `LostError` after `call_seconds`, and `StuckError`."""
        send = functools.partial(_send, path, request, response, metadata)
        channel = self._channel
        try:
            async with asyncio.timeout(self._first_seconds):
                return await send(channel, self._first_seconds)
        except (LostError, TimeoutError):
            return await self._send_again(send, channel)

    async def stream(self, path: str, request: Any, response: type[T]) -> AsyncIterator[T]:
        """Until it ends, or has been open for ten minutes. Raises `grpc.aio.AioRpcError`, and
        `LostError` when the connection is replaced."""
        call = self._channel.unary_stream(
            path, request_serializer=_serialize, response_deserializer=_deserializer(response)
        )(request, timeout=_STREAM_SECONDS)
        ends_at = asyncio.get_running_loop().time() + _STREAM_SECONDS + _STUCK_SECONDS
        try:
            while True:
                async with asyncio.timeout_at(ends_at):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield message
        except TimeoutError:
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            raise LostError from error
        finally:
            call.cancel()

    async def _send_again(
        self, send: Callable[[grpc.aio.Channel, float], Awaitable[T]], lost: grpc.aio.Channel
    ) -> T:
        """If the response comes sooner than the first was awaited, this connection replaces the one
        that lost the request; a runtime that is slow keeps its connection and its streams."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        other = self._open()
        try:
            try:
                async with asyncio.timeout(self._second_seconds + _STUCK_SECONDS):
                    result = await send(other, self._second_seconds)
            except TimeoutError as error:
                raise StuckError from error
            if self._channel is lost and loop.time() - started < self._first_seconds:
                self._channel, other = other, lost
            return result
        finally:
            await other.close()

    def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)


async def _send(
    path: str,
    request: Any,
    response: type[T],
    metadata: Metadata | None,
    channel: grpc.aio.Channel,
    seconds: float,
) -> T:
    """Raises `grpc.aio.AioRpcError` and `LostError`."""
    call = channel.unary_unary(
        path, request_serializer=_serialize, response_deserializer=_deserializer(response)
    )
    try:
        result: T = await call(request, timeout=seconds, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise LostError from error
        raise
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise LostError from error
    return result


def _is_cancelled() -> bool:
    """Whether this task is, and not only the call that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _deserializer(response: type[T]) -> Callable[[bytes], T]:
    decode: Callable[[bytes], T] = response.FromString  # type: ignore[attr-defined]
    return decode

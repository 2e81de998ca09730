"""PodInfo without its feature gate: both sockets exist, and each call ends with UNIMPLEMENTED.

KEP-4188 wants an error code then, not a missing socket: a client cannot distinguish that from an
agent that is not running. The kubelet has served so since 1.37.
"""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from typing import Final

import grpc

from agent import tasks
from agent.api import listen, server
from agent.api.podinfo import methods, sockets
from agent.api.server import LocalServer, RequestContext
from agent.logs import Event

MESSAGE: Final = (
    "the feature gate PodInfoAPI is off on this node; start 'podgate run' with --feature-gates "
    "PodInfoAPI=true"
)
_MAX_CALLS: Final = 256


class DisabledPodInfo:
    """Answers all methods of PodInfo and of the pods API with an error."""

    def __init__(self, run_directory: pathlib.Path) -> None:
        self._pods_api_path = sockets.pods_api(run_directory)
        self._local = LocalServer(
            methods.PODINFO,
            path=sockets.podinfo(run_directory),
            inner=sockets.inner(run_directory),
            max_calls=_MAX_CALLS,
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        failed = Event.PODINFO_NOT_SERVED
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "podinfo socket", lambda: listen.run_always(self._serve, failed))
            tasks.start(
                group, "pods-api socket", lambda: listen.run_always(self._serve_pods_api, failed)
            )

    async def _serve(self) -> None:
        handlers = {
            methods.LIST: grpc.unary_stream_rpc_method_handler(_reject_stream),
            methods.WATCH: grpc.unary_stream_rpc_method_handler(_reject_stream),
            methods.GET: grpc.unary_unary_rpc_method_handler(_reject),
        }
        # Never set: health reports NOT_SERVING.
        is_ready = asyncio.Event()
        async with self._local.serve(handlers, is_ready=is_ready):
            await asyncio.Event().wait()

    async def _serve_pods_api(self) -> None:
        handlers = {
            methods.LIST_PODS: grpc.unary_unary_rpc_method_handler(_reject),
            methods.GET_POD: grpc.unary_unary_rpc_method_handler(_reject),
            methods.WATCH_PODS: grpc.unary_stream_rpc_method_handler(_reject_stream),
        }
        async with server.serve_root(methods.PODS, handlers, self._pods_api_path):
            await asyncio.Event().wait()


async def _reject(request: bytes, context: RequestContext) -> bytes:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, MESSAGE)


async def _reject_stream(request: bytes, context: RequestContext) -> AsyncIterator[bytes]:
    yield await _reject(request, context)

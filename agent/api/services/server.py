"""Serves service endpoints to all processes on the node, also on the loopback if configured.

No client is trusted: requests are small, and each user may have only a number of calls open and
of filters in use, and get only a number of states without waiting. All clients of the loopback are
one user.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import grpc
import structlog

from agent.api.rate_limits import UserRates, UserSlots
from agent.api.server import LocalServer, RequestContext, decode
from agent.api.services import filters
from agent.api.services.filters import FilterError
from agent.api.services.publisher import ServicePublisher
from agent.api.services.view import ServiceView
from agent.api.services.view_pool import ViewLimitError
from agent.client.v1alpha1 import endpoints_pb2 as pb
from agent.logs import Event

log = structlog.get_logger(__name__)

SERVICE = "podgate.localnet.v1alpha1.Endpoints"

_MAX_CALLS = 4096
_MAX_CALLS_PER_USER = 1000
# The whole state of a big cluster is some 10 ms of the agent's time. A client that waits for the
# next state is not limited; a state that is sent without waiting takes one token of its user.
# After a restart all clients connect at once.
_STATES_PER_SECOND = 20.0
_STATES_BURST = 200


class ServicesServer:
    """Serves the snapshots of a publisher."""

    def __init__(
        self,
        publisher: ServicePublisher,
        *,
        path: pathlib.Path,
        inner: pathlib.Path,
        address: tuple[str, int] | None = None,
        burst: int = _STATES_BURST,
        calls_per_user: int = _MAX_CALLS_PER_USER,
    ) -> None:
        """inner: gRPC's own socket, in a directory that only root enters; address: host and port of
        the loopback, to serve there as well, port 0 for a free one; burst: states that a user gets
        in a row without waiting."""
        self._publisher = publisher
        self._address = address
        self._local = LocalServer(SERVICE, path=path, inner=inner, max_calls=_MAX_CALLS)
        self._rates = UserRates(per_second=_STATES_PER_SECOND, burst=burst)
        self._calls = UserSlots(calls_per_user)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve while inside; yields the port on the loopback, 0 without an address.

        Raises `ListenError`.
        """
        methods = {"Next": grpc.unary_stream_rpc_method_handler(self._next)}
        is_ready, address = self._publisher.is_ready, self._address
        async with self._local.serve(methods, is_ready=is_ready, address=address) as port:
            log.info(Event.SERVICES_LISTENING, socket=str(self._local.path), port=port or None)
            yield port

    async def run(self) -> None:
        """Serve until cancelled. Raises `ListenError`."""
        async with self.serve():
            await asyncio.Event().wait()

    async def _next(self, request: bytes, context: RequestContext) -> None:
        user = self._local.user_of(context)
        if not self._calls.has_room(user):
            await self._local.reject(context, "calls", "this user has too many calls open")
        with self._calls.hold(user):
            decoded = await decode(pb.NextFilter, request, context)
            try:
                selection = filters.read(decoded)
                with self._publisher.views.hold(user, decoded.node, selection) as view:
                    await self._send(decoded, view, user, context)
            except FilterError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except ViewLimitError as error:
                await self._local.reject(context, "filters", str(error))

    async def _send(
        self, request: pb.NextFilter, view: ServiceView, user: int, context: RequestContext
    ) -> None:
        """Send the next revision of the view."""
        instance_id, rev = request.instance_id, request.rev
        if self._publisher.has_newer(view, instance_id, rev) and not self._rates.take(user):
            await self._local.reject(
                context,
                "rate",
                "this user requests too many states; send the instance_id and rev of the last "
                "header, or try again in a second",
            )
        snapshot = await self._publisher.wait_newer(
            instance_id, rev, view=view, accepts_delta=request.accepts_delta
        )
        # A slow reader delays only itself, and gets the newest state with its next call. The
        # snapshot shares unchanged services with other revisions.
        for message in snapshot.messages(request):
            await context.write(message)

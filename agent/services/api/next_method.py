"""The method Endpoints/Next, for a server of this node's processes and one of other nodes.

No client is trusted: requests are small, and each user may have only a number of calls open and of
filters in use, and get only a number of states without waiting.
"""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import grpc

from agent.api.rate_limits import UserRates, UserSlots
from agent.api.server import RequestContext, decode
from agent.services.api import filters
from agent.services.api.filters import FilterError
from agent.services.api.publisher import ServicePublisher
from agent.services.api.view import ServiceView
from agent.services.api.view_pool import ViewLimitError
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

SERVICE = "podgate.localnet.v1alpha1.Endpoints"

_MAX_CALLS_PER_USER = 1000
# The whole state of a big cluster is some 10 ms of the agent's time. A client that waits for the
# next state is not limited; a state that is sent without waiting takes one token of its user.
# After a restart all clients connect at once.
_STATES_PER_SECOND = 20.0
_STATES_BURST = 200


class NextMethod:
    """Handles the calls of one server."""

    def __init__(
        self,
        publisher: ServicePublisher,
        *,
        user_of: Callable[[RequestContext], int],
        reject: Callable[[RequestContext, str, str], Awaitable[NoReturn]],
        burst: int = _STATES_BURST,
        calls_per_user: int = _MAX_CALLS_PER_USER,
    ) -> None:
        """reject: ends a call beyond a limit, with the limit's name and a message; burst: states
        that a user gets in a row without waiting."""
        self._publisher = publisher
        self._user_of = user_of
        self._reject = reject
        self._rates = UserRates(per_second=_STATES_PER_SECOND, burst=burst)
        self._calls = UserSlots(calls_per_user)

    @property
    def calls(self) -> int:
        """Open now."""
        return self._calls.total

    async def handle(self, request: bytes, context: RequestContext) -> None:
        user = self._user_of(context)
        if not self._calls.has_room(user):
            await self._reject(context, "calls", "this user has too many calls open")
        with self._calls.hold(user):
            decoded = await decode(pb.NextFilter, request, context)
            try:
                selection = filters.read(decoded)
                with self._publisher.views.hold(user, decoded.node, selection) as view:
                    await self._send(decoded, view, user, context)
            except FilterError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except ViewLimitError as error:
                await self._reject(context, "filters", str(error))

    async def _send(
        self, request: pb.NextFilter, view: ServiceView, user: int, context: RequestContext
    ) -> None:
        """Send the next revision of the view."""
        instance_id, rev = request.instance_id, request.rev
        if self._publisher.has_newer(view, instance_id, rev) and not self._rates.take(user):
            await self._reject(
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

"""The views in use: one for each node and filter, with limits per user."""

import asyncio
import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

from agent.api.rate_limits import UserRates
from agent.errors import PodgateError
from agent.services.api.encoder import ServiceEncoder
from agent.services.api.filters import FilterError, MessageForm, ServiceFilter
from agent.services.api.store import ServiceKey, ServiceStore
from agent.services.api.view import ServiceView

# A client calls again as soon as it has a state; then the difference is still to be had.
_IDLE_SECONDS = 60.0
# In a cluster of 10,000 services the encoded ones are some 10 MB, and the first evaluation takes a
# second of the agent's time; a view that differs in namespaces or types only costs less.
_MAX_VIEWS = 32
# A server for other nodes: one of each, most of which share their encoded services.
_MAX_VIEWS_OF_NODES = 4096
_MAX_VIEWS_PER_USER = 8
_VIEWS_PER_SECOND = 0.05
_VIEWS_BURST = 16

_ViewKey = tuple[str, ServiceFilter]
"""Node and filter."""


class ViewLimitError(PodgateError):
    """A user has too many different filters in use; the message is for the client."""


@dataclasses.dataclass(slots=True)
class _Use:
    """A view in the pool."""

    view: ServiceView
    calls: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Open calls by user."""
    last_used: dict[int, float] = dataclasses.field(default_factory=dict)
    """When a user's last call started or ended."""


class ViewPool:
    """Makes views when they are requested, and drops those that are no longer used.

    The view of the store's node without a filter always exists.
    """

    def __init__(
        self,
        store: ServiceStore,
        *,
        instance_id: int,
        is_for_all_nodes: bool = False,
        views_per_user: int = _MAX_VIEWS_PER_USER,
        views: int = 0,
        views_burst: int = _VIEWS_BURST,
    ) -> None:
        """instance_id: the publisher's; is_for_all_nodes: whether views of nodes other than the
        store's are made; views: of all users, 0 for the default; views_burst: that a user may have
        made in a row."""
        self._store = store
        self._instance_id = instance_id
        self._is_for_all_nodes = is_for_all_nodes
        self._views_per_user = views_per_user
        self._max_views = views or (_MAX_VIEWS_OF_NODES if is_for_all_nodes else _MAX_VIEWS)
        self._rates = UserRates(per_second=_VIEWS_PER_SECOND, burst=views_burst)
        self._encoders: weakref.WeakValueDictionary[MessageForm, ServiceEncoder] = (
            weakref.WeakValueDictionary()
        )
        self._uses: dict[_ViewKey, _Use] = {}
        self.default = self._make(store.node, ServiceFilter())

    def __len__(self) -> int:
        return 1 + len(self._uses)

    def __iter__(self) -> Iterator[ServiceView]:
        """All views, that of the agent's own node without a filter first."""
        yield self.default
        for use in list(self._uses.values()):
            yield use.view

    def mark(self, key: ServiceKey) -> None:
        """A service has changed."""
        for encoder in list(self._encoders.values()):
            encoder.forget(key)
        for view in self:
            view.mark(key)

    @contextlib.contextmanager
    def hold(self, user: int, node: str, selection: ServiceFilter) -> Iterator[ServiceView]:
        """Have a view while inside. node: empty for the store's own. Raises `FilterError` for
        another node's and `ViewLimitError`."""
        node = node or self._store.node
        if node != self._store.node and not self._is_for_all_nodes:
            raise FilterError(
                f"this server has no endpoints as node {node} uses them; send no node, or connect "
                "to a server for other nodes"
            )
        if (node, selection) == (self._store.node, ServiceFilter()):
            yield self.default
            return
        use = self._use(user, (node, selection))
        use.calls[user] += 1
        try:
            yield use.view
        finally:
            use.calls[user] -= 1
            if not use.calls[user]:
                del use.calls[user]
            use.last_used[user] = _now()

    def drop_unused(self) -> None:
        """Drop the views that no client has used for a minute."""
        until = _now() - _IDLE_SECONDS
        for key, use in list(self._uses.items()):
            for user, at in list(use.last_used.items()):
                if at < until and not use.calls[user]:
                    del use.last_used[user]
            if not use.last_used:
                del self._uses[key]

    def _use(self, user: int, key: _ViewKey) -> _Use:
        self.drop_unused()
        use = self._uses.get(key)
        if use is None or user not in use.last_used:
            self._make_room(user)
            use = self._uses.get(key)
        if use is None:
            if len(self._uses) >= self._max_views:
                raise ViewLimitError(
                    f"{self._max_views} different filters are in use on this node; use one of "
                    "them, or retry in a minute"
                )
            if not self._rates.take(user):
                raise ViewLimitError(
                    "this user requests new filters too often; use the same ones, or retry in a "
                    "minute"
                )
            use = self._uses[key] = _Use(self._make(*key))
        use.last_used[user] = _now()
        return use

    def _make_room(self, user: int) -> None:
        """Have the user use one view less if it uses as many as it may."""
        own = [use for use in self._uses.values() if user in use.last_used]
        if len(own) < self._views_per_user:
            return
        idle = [use for use in own if not use.calls[user]]
        if not idle:
            raise ViewLimitError(
                f"this user has {len(own)} different filters in use; use one of them, or end a call"
            )
        del min(idle, key=lambda use: use.last_used[user]).last_used[user]
        self.drop_unused()

    def _make(self, node: str, selection: ServiceFilter) -> ServiceView:
        encoder = self._encoders.get(selection.form)
        if encoder is None:
            encoder = ServiceEncoder(
                self._store, selection.form, is_for_all_nodes=self._is_for_all_nodes
            )
            self._encoders[selection.form] = encoder
        return ServiceView(
            self._store, encoder, node=node, selection=selection, instance_id=self._instance_id
        )


def _now() -> float:
    return asyncio.get_running_loop().time()

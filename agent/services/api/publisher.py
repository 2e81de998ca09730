"""Publishes the services of a store, by revision, for each view in use.

A view has a new revision only if what its clients get changes. Changes of Services and slices
coalesce; changed readiness of this node's own pods is published at once.
"""

import asyncio
from collections.abc import Iterable

from agent.api.publisher import Publisher, Readers
from agent.services.api.store import ServiceKey, ServiceStore
from agent.services.api.stretches import Stretches
from agent.services.api.view import SavedRevision, ServicesSnapshot, ServiceView
from agent.services.api.view_pool import ViewPool

# A roll-out changes slices several times a second; programming a proxy costs more than this.
COALESCING_SECONDS = 0.05
# A server for other nodes: sending a difference takes some 0.3 ms of CPU time. So it takes some
# 0.4 of a CPU at most, and 1,000 nodes have changes within about a second.
_SECONDS_PER_READER = 0.001


class ServicePublisher(Publisher):
    """Evaluates what changes in a store, for all views. Each revision of a view has a number of its
    own: a position is never that of another view, nor of an earlier one with the same filter."""

    def __init__(
        self,
        store: ServiceStore,
        *,
        instance_id: int | None = None,
        is_for_all_nodes: bool = False,
    ) -> None:
        """instance_id: random by default; is_for_all_nodes: whether there are views of other nodes
        than the store's."""
        super().__init__(settle_seconds=COALESCING_SECONDS, instance_id=instance_id)
        self.store = store
        self._is_for_all_nodes = is_for_all_nodes
        self.views = ViewPool(
            store, instance_id=self.instance_id, is_for_all_nodes=is_for_all_nodes
        )
        self._readers = Readers()
        self._saved: SavedRevision | None = None
        self._preparing = asyncio.Lock()
        store.listen(self)

    @property
    def settle_seconds(self) -> float:
        """How long changes are collected now."""
        return self._settle_seconds

    @property
    def snapshot(self) -> ServicesSnapshot | None:
        """The newest of this node without a filter."""
        view = self.views.default
        return view.snapshot() if view.rev else None

    def service_changed(self, key: ServiceKey, *, is_urgent: bool) -> None:
        """As `StoreListener`."""
        self.views.mark(key)
        self.hint(is_urgent=is_urgent)

    def zone_changed(self, node: str) -> None:
        """As `StoreListener`."""
        for view in self.views:
            if view.node == node:
                view.mark_all()
        self.hint()

    def set_saved(self, saved: SavedRevision | None) -> None:
        """Where the objects are from; None once the API server has sent them."""
        self._saved = saved
        self.hint()

    async def wait_rev(self, rev: int) -> int:
        """Wait for any view's revision after this one; returns the newest."""
        await self._readers.wait_until(lambda: self.rev > rev)
        return self.rev

    def has_newer(self, view: ServiceView, instance_id: int, rev: int) -> bool:
        """Whether `wait_newer` has a revision at once, or as soon as it is evaluated."""
        return self.is_ready.is_set() and (not view.rev or view.is_newer(instance_id, rev))

    async def wait_newer(
        self,
        instance_id: int,
        rev: int,
        *,
        view: ServiceView | None = None,
        accepts_delta: bool = False,
    ) -> ServicesSnapshot:
        """The newest revision of a view, once it is not this one; with `accepts_delta` the
        difference from this one, if it is known. view: of this node without a filter by default."""
        view = view or self.views.default
        await self.is_ready.wait()
        if not view.rev:
            await self._prepare(view)
        await view.readers.wait_until(lambda: view.is_newer(instance_id, rev))
        return view.changes_since(instance_id, rev) if accepts_delta else view.snapshot()

    async def _prepare(self, view: ServiceView) -> None:
        """Make the first revision of a view, one view at a time."""
        async with self._preparing:
            if not view.rev:
                await _evaluate([view])
                self._commit(view)

    async def _publish(self) -> None:
        self.views.drop_unused()
        # A new view has its first revision when a client waits for it, so that it delays no other.
        views = [view for view in self.views if view.rev or view is self.views.default]
        await _evaluate(views)
        changed = [view for view in views if self._commit(view)]
        self.is_ready.set()
        if self._is_for_all_nodes:
            readers = sum(len(view.readers) for view in views)
            self._settle_seconds = max(COALESCING_SECONDS, readers * _SECONDS_PER_READER)
        await Readers.wake([self._readers, *(view.readers for view in changed)])

    def _commit(self, view: ServiceView) -> bool:
        if not view.has_changed(self._saved):
            return False
        self.rev += 1
        view.commit(self.rev, self._saved)
        return True


async def _evaluate(views: Iterable[ServiceView]) -> None:
    """Evaluate what has changed, with breaks."""
    stretches = Stretches()
    for view in views:
        while view.dirty:
            view.evaluate_next()
            await stretches.step()

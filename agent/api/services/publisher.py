"""Publishes which endpoints of each service this node uses, by revision.

A revision changes only if a service changes as this node sees it. Changes of Services and slices
coalesce; changed readiness of this node's own pods is published at once.
"""

import asyncio
import dataclasses
import datetime
import time
from collections.abc import Iterator

from agent.api.publisher import SnapshotPublisher
from agent.api.services import encode, objects, slices, stream_items
from agent.api.services.slices import ParsedSlice, ReadinessSource
from agent.api.services.topology import NodeTopology

# A roll-out changes slices several times a second; programming a proxy costs more than this.
COALESCING_SECONDS = 0.05
# Time without a break for other tasks of the loop.
_STRETCH_SECONDS = 0.005

_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedRevision:
    """The revision of a previous agent whose objects are in the saved file, and when it wrote them.

    The file may lack what that agent published afterwards, and lacks nothing of it before.
    """

    instance_id: int
    rev: int
    saved_at: datetime.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class ServicesSnapshot:
    """One revision. services: encoded, sorted by namespace and name; shared between revisions.

    saved: where its objects are from; None if the API server has confirmed them since.
    """

    instance_id: int
    rev: int
    saved: SavedRevision | None
    services: tuple[bytes, ...]

    def messages(self) -> Iterator[bytes]:
        """The stream's items, encoded."""
        saved_at = self.saved.saved_at if self.saved else None
        yield stream_items.header(self.instance_id, self.rev, saved_at)
        yield from stream_items.parts(self.services)
        yield stream_items.end(len(self.services))


class ServicePublisher(SnapshotPublisher[ServicesSnapshot]):
    """Publishes all services of the cluster."""

    def __init__(
        self, node: str, *, readiness: ReadinessSource, instance_id: int | None = None
    ) -> None:
        """readiness: of this node's pods; instance_id: random by default."""
        super().__init__(settle_seconds=COALESCING_SECONDS, instance_id=instance_id)
        self._readiness = readiness
        self._topology = NodeTopology(node)
        self._services: dict[_Key, objects.ApiService] = {}
        self._slices: dict[_Key, dict[str, ParsedSlice]] = {}
        self._services_of_pod: dict[str, set[_Key]] = {}
        """Services with an endpoint here, by uid or address of its pod."""
        self._encoded: dict[_Key, bytes] = {}
        self._order: list[_Key] | None = []
        self._dirty: dict[_Key, None] = {}
        self._saved: SavedRevision | None = None
        self._published_saved: SavedRevision | None = None

    def set_service(self, old: objects.ApiService | None, new: objects.ApiService | None) -> None:
        """A service was added, changed or deleted."""
        service = new or old
        if service is None:
            return
        key = (service.metadata.namespace, service.metadata.name)
        if new is None:
            self._services.pop(key, None)
        else:
            self._services[key] = new
        self._mark(key)

    def set_slice(
        self, old: objects.EndpointSlice | None, new: objects.EndpointSlice | None
    ) -> None:
        """A slice was added, changed or deleted."""
        if old is not None and (new is None or old.service != new.service):
            self._put_slice(old, None)
        if new is not None:
            self._put_slice(new, slices.parse(new, self._topology.node))

    def set_zone(self, zone: str) -> None:
        """The node's zone, which every service depends on."""
        if zone != self._topology.zone:
            self._topology = NodeTopology(self._topology.node, zone)
            for key in self._services:
                self._mark(key)

    def set_saved(self, saved: SavedRevision | None) -> None:
        """Where the objects are from; None once the API server has sent them."""
        self._saved = saved
        self.hint()

    def is_newer(self, instance_id: int, rev: int) -> bool:
        """A saved state is not newer than what the same agent published after it was saved: a proxy
        would remove services that were added meanwhile, and connections to them would hang."""
        saved = self.snapshot.saved if self.snapshot else None
        if saved is not None and instance_id == saved.instance_id and rev > saved.rev:
            return False
        return super().is_newer(instance_id, rev)

    def pod_changed(self, keys: frozenset[str]) -> None:
        """The readiness of the pod with this uid and these addresses has changed."""
        for key in keys:
            for service in self._services_of_pod.get(key, ()):
                self._mark(service, is_urgent=True)

    def _put_slice(self, changed: objects.EndpointSlice, content: ParsedSlice | None) -> None:
        if not changed.service:
            return
        key = (changed.metadata.namespace, changed.service)
        of_service = self._slices.setdefault(key, {})
        before = of_service.pop(changed.metadata.name, None)
        if content is not None:
            of_service[changed.metadata.name] = content
        if not of_service:
            del self._slices[key]
        if before == content:
            return
        removed = before.local_keys if before else frozenset[str]()
        added = content.local_keys if content else frozenset[str]()
        if removed or added:
            used = {name for remaining in of_service.values() for name in remaining.local_keys}
            self._index(key, removed - used, added)
        self._mark(key)

    def _index(self, key: _Key, removed: frozenset[str], added: frozenset[str]) -> None:
        for name in removed:
            services = self._services_of_pod.get(name, set())
            services.discard(key)
            if not services:
                self._services_of_pod.pop(name, None)
        for name in added:
            self._services_of_pod.setdefault(name, set()).add(key)

    def _mark(self, key: _Key, *, is_urgent: bool = False) -> None:
        self._dirty[key] = None
        self.hint(is_urgent=is_urgent)

    async def _refresh(self) -> bool:
        is_changed = self._saved != self._published_saved
        self._published_saved = self._saved
        until = time.monotonic() + _STRETCH_SECONDS
        while self._dirty:
            key = next(iter(self._dirty))
            del self._dirty[key]
            is_changed |= self._evaluate(key)
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + _STRETCH_SECONDS
        return is_changed

    def _evaluate(self, key: _Key) -> bool:
        encoded = self._encode(key)
        before = self._encoded.get(key)
        if encoded == before:
            return False
        if encoded is None:
            del self._encoded[key]
        else:
            self._encoded[key] = encoded
        if before is None or encoded is None:
            self._order = None
        return True

    def _encode(self, key: _Key) -> bytes | None:
        service = self._services.get(key)
        if service is None:
            return None
        found = self._slices.get(key, {})
        # By name: which of two mentions counts must not depend on the order of arrival.
        in_order = [found[name] for name in sorted(found)]
        message = encode.encode_service(service, in_order, self._topology, self._readiness)
        return stream_items.element(message) if message is not None else None

    def _build(self) -> ServicesSnapshot:
        if self._order is None:
            self._order = sorted(self._encoded)
        return ServicesSnapshot(
            self.instance_id,
            self.rev,
            self._published_saved,
            tuple(self._encoded[key] for key in self._order),
        )

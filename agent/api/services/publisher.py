"""What this node should use of every service, by revision.

Services and slices come as they change; what is told changes only when a service, as this node is
to see it, is another. Many changes within a moment are one revision; what the node knows of its own
pods does not wait for that moment.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from agent.api.services import encode, objects, slices, stream_items
from agent.api.services.endpoint_selection import Place
from agent.api.services.slices import News, Slice

COALESCING_SECONDS: Final = 0.05
"""A roll-out changes slices several times a second; a proxy's programming costs more than this."""

# After so long at a stretch others of the loop have their turn.
_STRETCH_SECONDS: Final = 0.005

# What JSON can carry exactly.
_MOST_INSTANCE_ID: Final = (1 << 53) - 1

_Key = tuple[str, str]


class Snapshot(msgspec.Struct, frozen=True):
    """One revision. services: encoded, sorted by namespace and name; shared between revisions."""

    instance_id: int
    rev: int
    services: tuple[bytes, ...]

    def messages(self) -> Iterator[bytes]:
        """The stream's items, encoded."""
        yield stream_items.header(self.instance_id, self.rev)
        yield from stream_items.parts(self.services)
        yield stream_items.end(len(self.services))


class Book:
    """To be made and used on one event loop. Nothing is told before `complete`."""

    def __init__(self, node: str, *, news: News, instance_id: int | None = None) -> None:
        """news: what is known of the node's own pods; instance_id: random, if None."""
        self.instance_id = instance_id or 1 + secrets.randbelow(_MOST_INSTANCE_ID)
        self._news = news
        self._place = Place(node)
        self._services: dict[_Key, objects.Service] = {}
        self._slices: dict[_Key, dict[str, Slice]] = {}
        self._watchers_of: dict[str, set[_Key]] = {}
        """Which services have an endpoint here of a pod, by its uid or address."""
        self._encoded: dict[_Key, bytes] = {}
        self._order: list[_Key] | None = []
        self._dirty: dict[_Key, None] = {}
        self._is_complete = False
        self._has_changed = False
        self._is_urgent = False
        self._wanted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._published = asyncio.Event()
        self._current: Snapshot | None = None

    @property
    def current(self) -> Snapshot | None:
        """The newest revision; None before the first."""
        return self._current

    @property
    def rev(self) -> int:
        """0 before the first."""
        return self._current.rev if self._current else 0

    def set_service(self, old: objects.Service | None, new: objects.Service | None) -> None:
        """A service came, changed or went."""
        known = new or old
        if known is None:
            return
        key = (known.metadata.namespace, known.metadata.name)
        if new is None:
            self._services.pop(key, None)
        else:
            self._services[key] = new
        self._mark(key)

    def set_slice(
        self, old: objects.EndpointSlice | None, new: objects.EndpointSlice | None
    ) -> None:
        """A slice came, changed or went."""
        if old is not None and (new is None or old.service != new.service):
            self._put_slice(old, None)
        if new is not None:
            self._put_slice(new, slices.read(new, self._place.node))

    def set_zone(self, zone: str) -> None:
        """The node is in another zone. Everything is looked at again."""
        if zone != self._place.zone:
            self._place = Place(self._place.node, zone)
            for key in self._services:
                self._mark(key)

    def hear(self, keys: frozenset[str]) -> None:
        """`news` says something else of the pod with this uid and these addresses."""
        for key in keys:
            for service in self._watchers_of.get(key, ()):
                self._mark(service)
                self._hurry.set()

    def complete(self) -> None:
        """Everything has been told once: from now on there is something to tell."""
        if not self._is_complete:
            self._is_complete = self._has_changed = True
            self._wanted.set()
            self._hurry.set()

    async def run(self) -> None:
        """Make revisions until cancelled."""
        while True:
            await self._wanted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COALESCING_SECONDS):
                    await self._hurry.wait()
            self._wanted.clear()
            self._hurry.clear()
            await self._look()
            if self._is_complete and self._has_changed:
                self._publish()

    async def newer(self, instance_id: int, rev: int) -> Snapshot:
        """Wait for a revision other than this one."""
        while not self.is_newer(instance_id, rev):
            await self._published.wait()
        assert self._current is not None
        return self._current

    def is_newer(self, instance_id: int, rev: int) -> bool:
        """Whether there is a revision other than this one now."""
        return self._current is not None and (instance_id, rev) != (self.instance_id, self.rev)

    def _put_slice(self, one: objects.EndpointSlice, content: Slice | None) -> None:
        if not one.service:
            return
        key = (one.metadata.namespace, one.service)
        of_service = self._slices.setdefault(key, {})
        before = of_service.pop(one.metadata.name, None)
        if content is not None:
            of_service[one.metadata.name] = content
        if not of_service:
            del self._slices[key]
        if before == content:
            return
        gone = before.local_keys if before else frozenset[str]()
        come = content.local_keys if content else frozenset[str]()
        if gone or come:
            needed = {name for other in of_service.values() for name in other.local_keys}
            self._index(key, gone - needed, come)
        self._mark(key)

    def _index(self, key: _Key, gone: frozenset[str], come: frozenset[str]) -> None:
        for name in gone:
            watchers = self._watchers_of.get(name, set())
            watchers.discard(key)
            if not watchers:
                self._watchers_of.pop(name, None)
        for name in come:
            self._watchers_of.setdefault(name, set()).add(key)

    def _mark(self, key: _Key) -> None:
        self._dirty[key] = None
        if self._is_complete:
            self._wanted.set()

    async def _look(self) -> None:
        """Judge again what has changed, a few services at a stretch."""
        until = time.monotonic() + _STRETCH_SECONDS
        while self._dirty:
            key = next(iter(self._dirty))
            del self._dirty[key]
            self._judge(key)
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + _STRETCH_SECONDS

    def _judge(self, key: _Key) -> None:
        encoded = self._encode(key)
        before = self._encoded.get(key)
        if encoded == before:
            return
        self._has_changed = True
        if encoded is None:
            del self._encoded[key]
        else:
            self._encoded[key] = encoded
        if before is None or encoded is None:
            self._order = None

    def _encode(self, key: _Key) -> bytes | None:
        service = self._services.get(key)
        if service is None:
            return None
        found = self._slices.get(key, {})
        # By name: which of two mentions counts must not depend on who came first.
        told = encode.tell(
            service, [found[name] for name in sorted(found)], self._place, self._news
        )
        return stream_items.element(told) if told is not None else None

    def _publish(self) -> None:
        self._has_changed = False
        if self._order is None:
            self._order = sorted(self._encoded)
        self._current = Snapshot(
            self.instance_id, self.rev + 1, tuple(self._encoded[key] for key in self._order)
        )
        self._published.set()
        self._published = asyncio.Event()

"""The services as one node and one filter have them: revisions, and differences between them."""

import dataclasses
import datetime
import itertools
from collections.abc import Iterator

from agent.api.publisher import Readers
from agent.services.api import stream_items
from agent.services.api.encoder import ServiceEncoder
from agent.services.api.filters import ServiceFilter
from agent.services.api.store import ServiceKey, ServiceStore
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

# Changed services in all revisions that differences are sent of. A client that is further behind
# gets the whole state, which then is hardly larger.
_MAX_HISTORY = 4096


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
    """One revision, or the difference from another one to it.

    elements: encoded, sorted by namespace and name; shared between revisions and nodes.
    saved: where its objects are from; None if the API server has confirmed them since.
    """

    instance_id: int
    rev: int
    saved: SavedRevision | None
    elements: tuple[bytes, ...]
    service_count: int
    is_delta: bool = False

    def messages(self, request: pb.NextFilter | None = None) -> Iterator[bytes]:
        """The stream's items, encoded. request: has the filter that the header repeats."""
        yield stream_items.header(
            request or pb.NextFilter(),
            self.instance_id,
            self.rev,
            saved_at=self.saved.saved_at if self.saved else None,
            is_delta=self.is_delta,
        )
        yield from stream_items.parts(self.elements)
        yield stream_items.end(self.service_count)


class ServiceView:
    """What clients with one filter get of the services, for one node.

    The publisher evaluates changed services one by one, and commits them together as a revision.
    """

    def __init__(
        self,
        store: ServiceStore,
        encoder: ServiceEncoder,
        *,
        node: str,
        selection: ServiceFilter,
        instance_id: int,
    ) -> None:
        """instance_id: the publisher's."""
        self.node = node
        self.readers = Readers()
        self.rev = 0
        """0: none yet."""
        self.dirty: dict[ServiceKey, None] = {}
        """Services that have changed, to be evaluated."""
        self._store = store
        self._encoder = encoder
        self._filter = selection
        self._instance_id = instance_id
        self._encoded: dict[ServiceKey, bytes] = {}
        self._uncommitted: dict[ServiceKey, bytes | None] = {}
        self._saved: SavedRevision | None = None
        self._history: dict[int, tuple[ServiceKey, ...]] = {}
        """Which services changed with each of the last revisions."""
        self._history_size = 0
        self._snapshot: ServicesSnapshot | None = None
        """Of this revision, if a client has requested it whole."""
        self._order: list[ServiceKey] | None = None
        self.mark_all()

    def mark(self, key: ServiceKey) -> None:
        """A service has changed."""
        if self._filter.has_namespace(key[0]):
            self.dirty[key] = None

    def mark_all(self) -> None:
        for key in self._store.services:
            self.mark(key)

    def evaluate_next(self) -> None:
        """Evaluate one of the changed services."""
        key = next(iter(self.dirty))
        del self.dirty[key]
        encoded = self._encode(key)
        if encoded == self._encoded.get(key):
            self._uncommitted.pop(key, None)
        else:
            self._uncommitted[key] = encoded

    def has_changed(self, saved: SavedRevision | None) -> bool:
        """Whether `commit` makes a new revision."""
        return bool(self._uncommitted) or saved != self._saved or not self.rev

    def commit(self, rev: int, saved: SavedRevision | None) -> None:
        """Make what was evaluated the revision `rev`."""
        changed = tuple(self._uncommitted)
        for key, encoded in self._uncommitted.items():
            if encoded is None:
                del self._encoded[key]
                self._order = None
            else:
                if key not in self._encoded:
                    self._order = None
                self._encoded[key] = encoded
        self._uncommitted = {}
        self._snapshot = None
        self._remember(rev, changed)
        self.rev, self._saved = rev, saved

    def is_newer(self, instance_id: int, rev: int) -> bool:
        """Whether there is a revision, and it is not this one.

        A saved state is not newer than what the same agent published after it was saved: a proxy
        would remove services that were added meanwhile, and connections to them would hang.
        """
        saved = self._saved
        if saved is not None and instance_id == saved.instance_id and rev > saved.rev:
            return False
        return self.rev > 0 and (instance_id, rev) != (self._instance_id, self.rev)

    def snapshot(self) -> ServicesSnapshot:
        """The newest revision."""
        if self._snapshot is None:
            if self._order is None:
                self._order = sorted(self._encoded)
            elements = tuple(self._encoded[key] for key in self._order)
            self._snapshot = ServicesSnapshot(
                self._instance_id, self.rev, self._saved, elements, len(elements)
            )
        return self._snapshot

    def changes_since(self, instance_id: int, rev: int) -> ServicesSnapshot:
        """The difference from that revision to the newest; the newest as a whole if that one is not
        in the history, or the difference has as many services."""
        if instance_id != self._instance_id or rev not in self._history:
            return self.snapshot()
        changed: set[ServiceKey] = set()
        for later, keys in reversed(self._history.items()):
            if later == rev:
                break
            changed.update(keys)
        if len(changed) > len(self._encoded):
            return self.snapshot()
        in_order = sorted(changed)
        elements = [self._encoded[key] for key in in_order if key in self._encoded]
        elements += [stream_items.removed(key) for key in in_order if key not in self._encoded]
        return ServicesSnapshot(
            self._instance_id,
            self.rev,
            self._saved,
            tuple(elements),
            len(self._encoded),
            is_delta=True,
        )

    def _encode(self, key: ServiceKey) -> bytes | None:
        service = self._store.services.get(key)
        if service is None or not self._filter.selects(service):
            return None
        return self._encoder.encode(key, self._store.topology_of(self.node))

    def _remember(self, rev: int, changed: tuple[ServiceKey, ...]) -> None:
        """Of the oldest one the changes are not stored: nothing before it is."""
        self._history[rev] = changed if self._history else ()
        self._history_size += len(self._history[rev]) + 1
        while self._history_size > _MAX_HISTORY:
            oldest, next_oldest = itertools.islice(self._history, 2)
            del self._history[oldest]
            self._history_size -= 1 + len(self._history[next_oldest])
            self._history[next_oldest] = ()

"""What a node publishes of services and slices, as kube-proxy's change trackers see them."""

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections.abc import AsyncIterator, Sequence

from agent.services.api import filters, objects
from agent.services.api.encoder import ServiceEncoder
from agent.services.api.publisher import COALESCING_SECONDS, ServicePublisher
from agent.services.api.store import ServiceStore
from agent.services.api.view import ServicesSnapshot, ServiceView
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy.frontends import FrontendChange, FrontendTable
from bpf.abi import IPAddress
from tests.agent.services.api import making
from tests.agent.services.api.making import NODE

NODE_ADDRESSES = tuple(map(ipaddress.ip_address, ("198.18.250.1", "fd00:18::198:18:250:1")))


@dataclasses.dataclass(frozen=True)
class Synced:
    """The state after a sync, and what the sync changed: one pass of kube-proxy's loop."""

    services: dict[str, pb.ServiceEndpoints]
    """By "namespace/name"."""
    changed: set[str]
    """Services that were added, changed or removed."""
    frontends: FrontendChange
    """What the proxies get of that."""
    everything: dict[str, pb.ServiceEndpoints]
    """As `services`, with all endpoints and their conditions, as a client may request them."""


class ProxiedNode:
    """A publisher with fake time (pytest's marker `looptime`), and the frontends of a proxy."""

    def __init__(self, node_addresses: Sequence[IPAddress]) -> None:
        self._node_addresses = node_addresses
        self.publisher = ServicePublisher(ServiceStore(NODE, readiness=making.no_readiness))
        self._table = FrontendTable()
        self._services: dict[str, pb.ServiceEndpoints] = {}
        self._rev = 0

    def set_service(
        self, old: objects.ApiService | None, new: objects.ApiService | None = None
    ) -> None:
        self.publisher.store.set_service(old, new)

    def set_slice(
        self, old: objects.EndpointSlice | None, new: objects.EndpointSlice | None
    ) -> None:
        self.publisher.store.set_slice(old, new)

    @property
    def kept(self) -> int:
        """Services, and services that slices are kept for."""
        return len(self.publisher.store.services) + len(self.publisher.store._slices)

    async def sync(self) -> Synced:
        """The result of all changes since the last sync."""
        self.publisher.complete()
        await asyncio.sleep(2 * COALESCING_SECONDS)
        snapshot = self.publisher.snapshot
        assert snapshot is not None
        before, now = self._services, _services(snapshot)
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        self._services = now
        # A change makes a revision, and nothing else does.
        assert (snapshot.rev != self._rev) is bool(changed) or self._rev == 0
        self._rev = snapshot.rev
        frontends = self._table.update(now.values(), self._node_addresses)
        return Synced(now, changed, frontends, self._everything())

    def _everything(self) -> dict[str, pb.ServiceEndpoints]:
        store = self.publisher.store
        selection = filters.read(pb.NextFilter(all_endpoints=True, endpoint_details=True))
        encoder = ServiceEncoder(store, selection.form, is_for_all_nodes=False)
        view = ServiceView(store, encoder, node=NODE, selection=selection, instance_id=1)
        while view.dirty:
            view.evaluate_next()
        view.commit(1, None)
        return _services(view.snapshot())


def _services(snapshot: ServicesSnapshot) -> dict[str, pb.ServiceEndpoints]:
    items = [pb.NextItem.FromString(message) for message in snapshot.messages()]
    found = [one for item in items for one in item.services.items]
    return {f"{one.namespace}/{one.name}": one for one in found}


@contextlib.asynccontextmanager
async def proxied(
    node_addresses: Sequence[IPAddress] = NODE_ADDRESSES,
) -> AsyncIterator[ProxiedNode]:
    """A node without services. node_addresses: for node ports."""
    node = ProxiedNode(node_addresses)
    running = asyncio.create_task(node.publisher.run())
    try:
        yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

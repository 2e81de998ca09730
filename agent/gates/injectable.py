"""The host's interfaces: where its packets are stamped, from which packets count as its own, and
what addresses it has."""

import asyncio
from collections.abc import Collection

import structlog

from agent.gates import tun_interfaces
from agent.gates.host_devices import HostDevices
from agent.gates.worker import GateWorker
from agent.linux import own_addresses, rtnetlink
from agent.linux.node_routes import NodeRoutes
from agent.linux.rtnetlink import Link
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.store import PodStore
from agent.relay import interfaces as relay_interfaces
from bpf.abi import IPNetwork

log = structlog.get_logger(__name__)

_TIMEOUT_SECONDS = 10
# Netlink reports a new interface several times.
_DEBOUNCE_SECONDS = 0.1
# After a failure, and where there is a tun interface, for its routes: netlink would report all of
# the node, and a router has a million.
_AGAIN_SECONDS = 2.0


class InjectableInterfaces:
    """Keeps the programs on host devices and the map of injectable interfaces up to date."""

    def __init__(
        self,
        gate_worker: GateWorker,
        store: PodStore,
        host_devices: HostDevices,
        *,
        forwarding: Collection[str] = (),
    ) -> None:
        """forwarding: names (with wildcards) of tun interfaces that carry traffic of others."""
        self._gate_worker = gate_worker
        self._map = gate_worker.injectable
        self._store = store
        self._host_devices = host_devices
        self._forwarding = forwarding
        self._routes = NodeRoutes()
        self._changed = asyncio.Event()
        self._pods = store.in_force.subscribe(Subscription(self._changed))
        self._seen: object = None
        self._marked: set[int] | None = None
        self._addresses: set[IPNetwork] | None = None
        self._is_hinted = False
        self._has_tun = False
        self._is_done = True

    def hint(self) -> None:
        """An interface appeared, vanished or changed."""
        self._is_hinted = True
        self._changed.set()

    async def run(self) -> None:
        """Refresh at once, and after every hint, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_DEBOUNCE_SECONDS)
            await self._wait()

    async def refresh(self) -> None:
        """Read the host's interfaces, and have all of them as they should be.

        Before the first gate, too: a gate relies on what was stamped before. Raises `OSError` or
        `TimeoutError`.
        """
        self._is_hinted = False
        self._seen = self._pods_interfaces()
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            found = await rtnetlink.read()
            uplinks = await self._routes.uplinks()
            tuns = await self._tuns_of_host(found)
            addresses = await own_addresses.read(found)
        await self._list_addresses(addresses)
        self._is_done = await self._host_devices.ensure(found, uplinks, tuns)
        relays = {link.index for link in found if relay_interfaces.is_relay_interface(link.name)}
        await self._mark(relays | tuns)

    async def _wait(self) -> None:
        try:
            is_settled = self._is_done and not self._has_tun
            async with asyncio.timeout(None if is_settled else _AGAIN_SECONDS):
                while not self._is_hinted and self._pods_interfaces() == self._seen:
                    self._pods.take()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _pods_interfaces(self) -> object:
        return (
            self._store.is_synced,
            self._store.gated_interfaces(),
            self._store.enforced_interfaces(),
            self._store.ungated_interfaces(),
        )

    async def _tuns_of_host(self, found: list[Link]) -> set[int]:
        """Those whose packets count as the host's, as most do."""
        tuns = tun_interfaces.find_tuns(found)
        self._has_tun = bool(tuns)
        pods = self._store.confirmed_addresses()
        of_host = set()
        for link in tuns:
            if tun_interfaces.is_named(link, self._forwarding):
                continue
            if not tun_interfaces.forwarding_routes(await self._routes.routes_by(link.index), pods):
                of_host.add(link.index)
        return of_host

    async def _list_addresses(self, addresses: set[IPNetwork]) -> None:
        """Those in whose name host processes may reply to pods."""
        if addresses == self._addresses:
            return
        await self._gate_worker.run(self._gate_worker.node_addresses.set, addresses)
        if self._addresses is None:
            self._gate_worker.config.set_node_addresses(are_kept=True)
        self._addresses = addresses

    async def _mark(self, injecting: set[int]) -> None:
        """injecting: interfaces whose packets the host sends: of relays, the kubelet's."""
        marked = self._marked
        if marked is None:
            marked = await self._gate_worker.run(self._map.marked)
        for ifindex in injecting ^ marked:
            try:
                await self._gate_worker.run(
                    self._map.mark, ifindex, is_node_sent=ifindex in injecting
                )
            except ValueError:
                injecting = injecting - {ifindex}  # beyond the map's end, where it counts anyway
        self._marked = injecting
        if injecting != marked:
            log.info(Event.INJECTABLE_INTERFACES_CHANGED, interfaces=sorted(injecting))

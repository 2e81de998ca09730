"""Injectable interfaces: those on which a host process can inject packets that look forwarded."""

import asyncio
from collections.abc import Callable

import pyroute2
import structlog

from agent.gates.host_devices import HostDevices
from agent.gates.worker import GateWorker
from agent.linux import rtnetlink
from agent.linux.rtnetlink import Link
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.store import PodStore
from agent.relay import interfaces as relay_interfaces

log = structlog.get_logger(__name__)

# The host receives a frame again that a host process writes to one of these.
_INJECTING_KINDS = frozenset({"tun", "macvlan", "macvtap", "ipvlan", "ipvtap", "ifb"})

# A CNI makes a veth pair in the host's namespace and moves one end into the pod a moment later. If
# it were marked in between, the pod's own traffic would count as the host's, permanently if the
# agent died at that moment. A process that creates interfaces has CAP_NET_ADMIN and is not blocked
# anyway.
_SETTLE_SECONDS = 2.0
_TIMEOUT_SECONDS = 10
# Netlink reports a new interface several times.
_DEBOUNCE_SECONDS = 0.1


class InjectableInterfaces:
    """Keeps the map of injectable interfaces up to date."""

    def __init__(
        self,
        gate_worker: GateWorker,
        store: PodStore,
        host_devices: HostDevices,
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        """host_devices: brought up to date with the same list of interfaces."""
        self._gate_worker = gate_worker
        self._map = gate_worker.injectable
        self._store = store
        self._host_devices = host_devices
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._changed = asyncio.Event()
        self._pods = store.in_force.subscribe(Subscription(self._changed))
        self._gated: set[int] = set()
        self._is_hinted = False
        self._first_seen: dict[int, float] = {}

    def hint(self) -> None:
        """An interface appeared, vanished or changed."""
        self._is_hinted = True
        self._changed.set()

    async def run(self) -> None:
        """Refresh at once, and after every hint, until cancelled."""
        marked = await self._gate_worker.run(self._map.marked)
        async with pyroute2.AsyncIPRoute() as netlink:
            while True:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    found = await rtnetlink.read(netlink)
                marked = await self._mark(found, marked)
                self._gated = self._store.gated_interfaces()
                await self._host_devices.ensure(found)
                await self._wait()

    async def _wait(self) -> None:
        oldest = min(self._first_seen.values(), default=None)
        deadline = None if oldest is None else max(0.0, oldest + _SETTLE_SECONDS - self._now())
        try:
            async with asyncio.timeout(deadline):
                while not self._is_hinted and self._store.gated_interfaces() == self._gated:
                    self._pods.take()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_DEBOUNCE_SECONDS)
        self._is_hinted = False

    async def _mark(self, found: list[Link], marked: set[int]) -> set[int]:
        """Mark injectable interfaces once they have settled; clear all others at once."""
        injecting = {link.index for link in found if can_inject(link)}
        for ifindex in self._first_seen.keys() - injecting:
            del self._first_seen[ifindex]
        settled = set()
        for ifindex in injecting - marked:
            if self._now() - self._first_seen.setdefault(ifindex, self._now()) >= _SETTLE_SECONDS:
                settled.add(ifindex)
                del self._first_seen[ifindex]
        after = (marked & injecting) | settled
        if after != marked:
            for ifindex in after ^ marked:
                is_node_sent = ifindex in after
                await self._gate_worker.run(self._map.mark, ifindex, is_node_sent=is_node_sent)
            log.info(Event.INJECTABLE_INTERFACES_CHANGED, interfaces=sorted(after))
        return after


def can_inject(link: Link) -> bool:
    """Whether packets that the host receives on a link may come from a host process.

    A veth whose peer has no namespace number has both ends on the host. Packets from a relay come
    from the kubelet.
    """
    if relay_interfaces.is_relay_interface(link.name):
        return True
    if link.kind == "veth":
        return link.peer is not None and link.peer_nsid is None
    return link.kind in _INJECTING_KINDS

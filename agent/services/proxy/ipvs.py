"""The IPVS backend: the kernel's load balancer in the node's network namespace.

Every address of a service is a virtual service with its endpoints as destinations, and a local
route, by which its packets reach IPVS (kube-proxy binds the addresses to a dummy interface
instead). IPVS balances only, so a small nftables table masquerades, rejects and checks sources.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence

from agent.linux import nft
from agent.linux.local_routes import LocalRoutes
from agent.linux.nft_monitor import Deleted
from agent.services.client.diff import Differ
from agent.services.linux import ipvs
from agent.services.linux.ipvs import Destination, DestinationState, IpvsError, IpvsTable
from agent.services.proxy import conntrack, ipvs_rules
from agent.services.proxy.backend import BackendError
from agent.services.proxy.frontends import Frontend, FrontendChange
from bpf.abi import IPAddress, IPNetwork
from bpf.services.tables import ServiceAddress

# Origin of our routes, as `ip route show table local` shows it; a number that rtnetlink.h does not
# assign, and not the relay's.
_ROUTE_PROTOCOL = 113

# What the kernel has: a virtual service with the seconds of its affinity, a destination with its
# weight, or a local route.
_Entry = ServiceAddress | Destination | IPAddress
_Entries = dict[_Entry, int]


class IpvsBackend:
    """Maintains virtual services, routes and the table."""

    is_polled = True

    def __init__(self, pod_networks: Sequence[IPNetwork]) -> None:
        """Use `open` instead."""
        self._pod_networks = tuple(pod_networks)
        self._frontends: dict[ServiceAddress, Frontend] = {}
        # None: what the kernel has is unknown.
        self._differ: Differ[_Entry, int] | None = None
        self._ruleset = ""

    @classmethod
    async def open(cls, pod_networks: Sequence[IPNetwork] = ()) -> "IpvsBackend":
        """pod_networks: as for nftables. Raises `BackendError` if IPVS or nftables is missing."""
        try:
            await asyncio.to_thread(ipvs.set_up)
            await nft.query("list", "tables")
        except (IpvsError, nft.NftError, TimeoutError) as error:
            reason = str(error) or "nft timed out"
            raise BackendError(f"{reason}: use another --backend, such as nft") from error
        return cls(pod_networks)

    async def apply(self, change: FrontendChange) -> None:
        self._frontends |= change.changed
        for address in change.removed:
            self._frontends.pop(address, None)
        differ, self._differ = self._differ, None
        try:
            if differ is None:
                self._ruleset = ""
                differ = Differ(await asyncio.to_thread(_installed))
            frontends = dict(self._frontends)
            ruleset = await asyncio.to_thread(ipvs_rules.ruleset_of, frontends, self._pod_networks)
            if ruleset != self._ruleset or not await _has_table():
                await nft.apply(ruleset)
            await asyncio.to_thread(lambda: _change(differ, entries_of(frontends)))
        except (IpvsError, nft.NftError, OSError) as error:
            reason = str(error) or "nft timed out"
            raise BackendError(f"IPVS cannot apply the services: {reason}") from error
        self._ruleset, self._differ = ruleset, differ
        await conntrack.follow(change)

    def is_concerned(self, deleted: Deleted) -> bool:
        return (ipvs_rules.TABLE, "") in deleted

    async def repair(self) -> bool:
        if self._differ is None or await _has_table():
            return False
        await self.apply(FrontendChange({}, set()))
        return True

    async def close(self) -> None:
        """The backend has nothing open."""


async def remove() -> None:
    """Remove all of it, also that of another process. Raises `BackendError`."""
    try:
        if ipvs.is_loaded():
            await asyncio.to_thread(lambda: _change(Differ(_installed()), {}))
        if await _has_table():
            await nft.apply(f"delete table inet {ipvs_rules.TABLE}\n")
    except nft.NftMissingError:
        return
    except (IpvsError, nft.NftError, OSError) as error:
        reason = str(error) or "nft timed out"
        raise BackendError(f"the proxy's IPVS services cannot be removed: {reason}") from error


async def _has_table() -> bool:
    """False also if another program flushed the ruleset."""
    return f"table inet {ipvs_rules.TABLE}" in (await nft.query("list", "tables")).splitlines()


def entries_of(frontends: Mapping[ServiceAddress, Frontend]) -> _Entries:
    """What the kernel is to have.

    IPVS does not know where a client is, so external addresses have the endpoints for clients from
    outside, which with `Local` policy are of this node; without any those for the node's own.
    """
    entries: _Entries = {}
    for address, frontend in frontends.items():
        entries[address] = frontend.affinity_seconds
        for endpoint in frontend.outside or frontend.endpoints:
            entries[Destination(address, endpoint)] = 1
        entries[address.address] = 0
    return entries


def _installed() -> _Entries:
    entries: _Entries = {}
    with contextlib.closing(IpvsTable()) as table, contextlib.closing(_routes()) as routes:
        for service, seconds in table.services().items():
            entries[service] = seconds
            for destination, state in table.destinations(service).items():
                entries[destination] = state.weight
        entries |= dict.fromkeys(routes.addresses(), 0)
    return entries


def _change(differ: Differ[_Entry, int], entries: _Entries) -> None:
    """A service is complete before packets reach it, and they stop before it is removed."""
    with contextlib.closing(IpvsTable()) as table, contextlib.closing(_routes()) as routes:
        entries |= _draining(table, differ.compare(entries).removed, entries)
        change = differ.compare(entries)
        for is_new, written in ((True, change.added), (False, change.changed)):
            for entry in sorted(written, key=_rank):
                if isinstance(entry, ServiceAddress):
                    table.put_service(entry, written[entry], is_new=is_new)
                elif isinstance(entry, Destination):
                    table.put_destination(entry, written[entry], is_new=is_new)
                else:
                    routes.add(entry)
        for entry in sorted(change.removed, key=_rank, reverse=True):
            if isinstance(entry, ServiceAddress):
                table.remove_service(entry)
            elif not isinstance(entry, Destination):
                routes.remove(entry)
            elif entry.service not in change.removed:
                table.remove_destination(entry)
    differ.accept()


def _draining(table: IpvsTable, removed: Mapping[_Entry, int], entries: _Entries) -> _Entries:
    """Destinations that stay without new connections, as long as they have open ones.

    IPVS drops packets to a removed destination. What is idle goes with a later change.
    """
    draining: _Entries = {}
    # A service may lose thousands at once, and each reading has all of them.
    states: dict[ServiceAddress, Mapping[Destination, DestinationState]] = {}
    for entry, weight in removed.items():
        if not isinstance(entry, Destination) or entry.service not in entries:
            continue
        if entry.service.protocol == socket.IPPROTO_UDP:  # without connections
            continue
        if entry.service not in states:
            states[entry.service] = table.destinations(entry.service)
        state = states[entry.service].get(entry)
        if state is not None and (weight or state.connections):
            draining[entry] = 0
    return draining


def _rank(entry: _Entry) -> int:
    return 0 if isinstance(entry, ServiceAddress) else 1 if isinstance(entry, Destination) else 2


def _routes() -> LocalRoutes:
    return LocalRoutes(_ROUTE_PROTOCOL)

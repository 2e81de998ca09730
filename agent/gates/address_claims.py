"""Which of the addresses in a pod's namespace are the pod's own, and which it only claims.

A pod with CAP_NET_ADMIN in its namespace gives itself any address it likes: the node's, the API
server's, another pod's. So what its namespace shows counts in its own gate alone, which it can only
close. Whoever acts on an address for others (connect hooks, relay targets, bridges, self-tests, the
end of existing flows) uses confirmed ones: those that the container runtime or the manifest's
status reports for the pod, else those that the node's own routes send out by the pod's interface.
Never the node's own address, and never one that is reported for another pod.

Link-local addresses are never confirmed: they mean nothing without an interface.
"""

import asyncio
import dataclasses
import enum

import structlog

from agent.linux.node_routes import NodeRoutes, RouteKind
from agent.linux.pod_network import PodNetwork
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims
from agent.pods.store import PodStore
from bpf.abi import IPAddress
from probes.netns import Netns

log = structlog.get_logger(__name__)

# A CNI adds the node's route, and IPv6 finishes duplicate address detection, up to some seconds
# after the address is there. Until then an unconfirmed one is checked again and reported to nobody.
_SETTLE_SECONDS = 6.0
# A neighbour on a bridge answers within microseconds; on a busy node it takes a few milliseconds.
_RESOLVE_WAITS_SECONDS = (0.001, 0.004, 0.015)
# A pod may give itself thousands, and each costs the agent some queries at each check.
_MOST_CHECKED = 64


class _Standing(enum.Enum):
    CONFIRMED = enum.auto()
    UNKNOWN = enum.auto()
    """Nothing speaks for it or against it: what was confirmed once stays so."""
    ELSEWHERE = enum.auto()
    """The node routes it by another interface: the same, since a CNI may change its ways."""
    FOREIGN = enum.auto()
    """It is the node's or another pod's."""


@dataclasses.dataclass(slots=True)
class _Record:
    netns: Netns
    confirmed: set[IPAddress] = dataclasses.field(default_factory=set)
    first_seen: dict[IPAddress, float] = dataclasses.field(default_factory=dict)
    reported: str = ""


class AddressAuthority:
    """Confirms pods' addresses. One check at a time, on the event loop; `close` it at the end."""

    def __init__(self, store: PodStore, routes: NodeRoutes | None = None) -> None:
        self._store = store
        self._changes = store.desired.subscribe()
        self._routes = routes or NodeRoutes()
        self._records: dict[str, _Record] = {}
        self._reported_for: dict[IPAddress, dict[str, str]] = {}
        """By address, the pods' uids and names for which the runtime or manifest reports it."""
        self._reported_of: dict[str, tuple[IPAddress, ...]] = {}

    def close(self) -> None:
        self._routes.close()

    def _refresh(self) -> None:
        """Learn what is reported of pods; before any pod is checked that may claim the same."""
        for uid in self._changes.take():
            if state := self._store.get(uid):
                self._set_pod(state.pod)
            else:
                self._forget(uid)

    def _set_pod(self, pod: Pod) -> None:
        self._withdraw(pod.uid)
        if not pod.host_network:
            self._reported_of[pod.uid] = pod.reported_addresses
            for address in pod.reported_addresses:
                self._reported_for.setdefault(address, {})[pod.uid] = pod.full_name

    def _forget(self, uid: str) -> None:
        self._withdraw(uid)
        self._records.pop(uid, None)

    async def check(self, pod: Pod, netns: Netns, network: PodNetwork) -> AddressClaims:
        """Compare what the namespace shows with what the node knows. Raises `OSError`."""
        self._refresh()
        record = self._records.get(pod.uid)
        if record is None or record.netns != netns:
            record = self._records[pod.uid] = _Record(netns)
        addresses = [address for address in network.addresses if not address.is_link_local]
        now = asyncio.get_running_loop().time()
        record.first_seen = {address: record.first_seen.get(address, now) for address in addresses}
        record.confirmed &= set(addresses)
        unconfirmed = dict.fromkeys(addresses, "one of too many")
        for address in self._worth_a_check(pod, record, addresses):
            is_new = record.first_seen[address] == now
            standing, why = await self._standing(pod, network, address, may_wait=is_new)
            if standing is _Standing.CONFIRMED:
                record.confirmed.add(address)
            elif standing is _Standing.FOREIGN:
                record.confirmed.discard(address)
            if address in record.confirmed:
                del unconfirmed[address]
            else:
                unconfirmed[address] = why
        return AddressClaims(
            tuple(address for address in addresses if address in record.confirmed),
            unconfirmed,
            any(record.first_seen[address] + _SETTLE_SECONDS > now for address in unconfirmed),
        )

    def is_news(self, uid: str, problem: str) -> bool:
        """Whether a problem of a pod's claims was not reported yet; it counts as reported then."""
        record = self._records.get(uid)
        if record is None or problem == record.reported:
            return False
        record.reported = problem
        return bool(problem)

    def _worth_a_check(
        self, pod: Pod, record: _Record, addresses: list[IPAddress]
    ) -> list[IPAddress]:
        """Reported and confirmed ones come first, so that a pod's claims push out none of them."""
        first = {*pod.reported_addresses, *record.confirmed}
        return sorted(addresses, key=lambda address: address not in first)[:_MOST_CHECKED]

    async def _standing(
        self, pod: Pod, network: PodNetwork, address: IPAddress, *, may_wait: bool
    ) -> tuple[_Standing, str]:
        route = await self._routes.route_to(address)
        if route.kind is RouteKind.OWN:
            return _Standing.FOREIGN, "the node's own"
        reported_for = self._reported_for.get(address, {})
        if pod.uid in reported_for:
            return _Standing.CONFIRMED, ""
        if reported_for:
            return _Standing.FOREIGN, f"that of pod {min(reported_for.values())}"
        if route.kind is RouteKind.NONE:
            return _Standing.UNKNOWN, "routed nowhere by the node"
        interfaces = {interface.ifindex for interface in network.interfaces}
        if route.ifindex in interfaces:
            return _Standing.CONFIRMED, ""
        bridges = {interface.bridge for interface in network.interfaces}
        # A neighbour is whoever answers first, so that is no match for what a runtime reports.
        if route.ifindex in bridges and not pod.reported_addresses:
            port = await self._bridge_port(address, route.ifindex, may_wait=may_wait)
            if port is None:
                return _Standing.UNKNOWN, "not found by the node on its bridge"
            if port in interfaces:
                return _Standing.CONFIRMED, ""
            return _Standing.FOREIGN, "another port's on the node's bridge"
        return _Standing.ELSEWHERE, "routed by the node through another interface"

    async def _bridge_port(self, address: IPAddress, bridge: int, *, may_wait: bool) -> int | None:
        port = await self._routes.bridge_port_of(address, bridge)
        if port is not None:
            return port
        await self._routes.solicit(address, bridge)
        for seconds in _RESOLVE_WAITS_SECONDS if may_wait else ():
            await asyncio.sleep(seconds)
            port = await self._routes.bridge_port_of(address, bridge)
            if port is not None:
                break
        return port

    def _withdraw(self, uid: str) -> None:
        for address in self._reported_of.pop(uid, ()):
            pods = self._reported_for[address]
            pods.pop(uid, None)
            if not pods:
                del self._reported_for[address]

"""Which of the addresses in a pod's namespace are the pod's own, and which it only claims.

A pod with CAP_NET_ADMIN in its namespace can give itself any address: the node's, the API
server's, another pod's. So the addresses in its namespace count in its own gate only, which drops
more because of them, never less. Code whose action on an address affects others (connect hooks,
relay targets, bridges, path tests, closing of existing flows) uses confirmed ones: those that the
container runtime or the manifest's status reports for the pod, else those that the node routes to
the pod's interface. The node's own addresses are never confirmed, nor those reported for another
pod, nor link-local ones, which mean nothing without an interface.
"""

import asyncio
import dataclasses
import enum

import structlog

from agent.backoff import Pace
from agent.linux.node_routes import NodeRoutes, RouteKind
from agent.linux.pod_network import PodNetwork
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims
from agent.pods.store import PodStore
from bpf.abi import IPAddress
from probes.netns import Netns

log = structlog.get_logger(__name__)

# A CNI adds the node's route, and IPv6 finishes duplicate address detection, up to some seconds
# after the address appears. Until then an unconfirmed one is checked again and not reported.
_SETTLE_SECONDS = 6.0
# A neighbour on a bridge answers within microseconds; on a busy node it takes a few milliseconds.
_RESOLVE_WAITS_SECONDS = (0.001, 0.004, 0.015)
# A pod may give itself thousands, and the agent sends some queries for each at every check.
_MOST_CHECKED = 64

# Between two reports of the same kind of problem of one pod.
_REPORT_SECONDS, _MAX_REPORT_SECONDS = 60.0, 3600.0

_UNRESOLVED = "not found by the node on its bridge"
_OF_POD = "that of pod"


class _Evidence(enum.Enum):
    """The result of checking whether an address belongs to the pod."""

    CONFIRMED = enum.auto()
    MISSING = enum.auto()
    """Neither for nor against: an address that was confirmed before stays confirmed."""
    ELSEWHERE = enum.auto()
    """The node routes it to another interface. Likewise, since a CNI may change its routes."""
    FOREIGN = enum.auto()
    """It belongs to the node or to another pod."""


def _report_pace() -> Pace:
    return Pace(at_once=1, base_seconds=_REPORT_SECONDS, cap_seconds=_MAX_REPORT_SECONDS)


@dataclasses.dataclass(slots=True)
class _Record:
    netns: Netns
    confirmed: set[IPAddress] = dataclasses.field(default_factory=set)
    first_seen: dict[IPAddress, float] = dataclasses.field(default_factory=dict)
    reported: str = ""
    """The problem that was reported last."""
    kinds: set[str] = dataclasses.field(default_factory=set)
    """Kinds of problems that were reported."""
    pace: Pace = dataclasses.field(default_factory=_report_pace)


class AddressAuthority:
    """Confirms pods' addresses. One check at a time, on the event loop."""

    def __init__(self, store: PodStore, routes: NodeRoutes | None = None) -> None:
        self._store = store
        self._changes = store.desired.subscribe()
        self._routes = routes or NodeRoutes()
        self._records: dict[str, _Record] = {}
        self._reported_for: dict[IPAddress, dict[str, str]] = {}
        """By address, the pods' uids and names for which the runtime or manifest reports it."""
        self._reported_of: dict[str, tuple[IPAddress, ...]] = {}

    def _refresh(self) -> None:
        """Update the reported addresses; before a pod is checked that may claim the same ones."""
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
        """Compare the namespace's addresses with reports and node routes. Raises `OSError`."""
        self._refresh()
        record = self._records.get(pod.uid)
        if record is None or record.netns != netns:
            record = self._records[pod.uid] = _Record(netns)
        addresses = [address for address in network.addresses if not address.is_link_local]
        now = asyncio.get_running_loop().time()
        record.first_seen = {address: record.first_seen.get(address, now) for address in addresses}
        record.confirmed &= set(addresses)
        unconfirmed = dict.fromkeys(addresses, "one of too many")
        checked = self._worth_a_check(pod, record, addresses)
        for address in checked:
            unconfirmed[address] = await self._check_one(pod, network, record, address)
        # All new neighbours at once: a pod may show new addresses again and again.
        for seconds in _RESOLVE_WAITS_SECONDS:
            unresolved = [
                address
                for address in checked
                if unconfirmed[address] == _UNRESOLVED and record.first_seen[address] == now
            ]
            if not unresolved:
                break
            await asyncio.sleep(seconds)
            for address in unresolved:
                unconfirmed[address] = await self._check_one(pod, network, record, address)
        for address in record.confirmed:
            del unconfirmed[address]
        return AddressClaims(
            tuple(address for address in addresses if address in record.confirmed),
            unconfirmed,
            any(record.first_seen[address] + _SETTLE_SECONDS > now for address in unconfirmed),
        )

    async def _check_one(
        self, pod: Pod, network: PodNetwork, record: _Record, address: IPAddress
    ) -> str:
        """Why the address is unconfirmed, after the record is brought up to date."""
        evidence, why = await self._evidence_for(pod, network, address)
        if evidence is _Evidence.CONFIRMED:
            record.confirmed.add(address)
        elif evidence is _Evidence.FOREIGN:
            record.confirmed.discard(address)
        return why

    def is_due(self, uid: str, claims: AddressClaims) -> bool:
        """Whether the problem of a pod's claims is to be reported; it counts as reported now.

        Each kind of problem once, then ever more rarely: a pod can show other addresses each time.
        """
        record = self._records.get(uid)
        if record is None or claims.problem in ("", record.reported):
            return False
        kinds = {_kind(why) for why in claims.unconfirmed.values()}
        now = asyncio.get_running_loop().time()
        if record.pace.happened(now) > now and kinds <= record.kinds:
            return False
        record.pace.handled(now)
        record.kinds |= kinds
        record.reported = claims.problem
        return True

    def _worth_a_check(
        self, pod: Pod, record: _Record, addresses: list[IPAddress]
    ) -> list[IPAddress]:
        """At most 64. Reported and confirmed ones come first, so claims displace none of them."""
        first = {*pod.reported_addresses, *record.confirmed}
        return sorted(addresses, key=lambda address: address not in first)[:_MOST_CHECKED]

    async def _evidence_for(
        self, pod: Pod, network: PodNetwork, address: IPAddress
    ) -> tuple[_Evidence, str]:
        route = await self._routes.route_to(address)
        if route.kind is RouteKind.OWN:
            return _Evidence.FOREIGN, "an address of the node"
        reported_for = self._reported_for.get(address, {})
        if pod.uid in reported_for:
            return _Evidence.CONFIRMED, ""
        if reported_for:
            return _Evidence.FOREIGN, f"{_OF_POD} {min(reported_for.values())}"
        if route.kind is RouteKind.NONE:
            return _Evidence.MISSING, "without a route on the node"
        interfaces = {interface.ifindex for interface in network.interfaces}
        if route.ifindex in interfaces:
            return _Evidence.CONFIRMED, ""
        bridges = {interface.bridge for interface in network.interfaces}
        # Any port can answer for a neighbour first, so a runtime's report has precedence.
        if route.ifindex in bridges and not pod.reported_addresses:
            port = await self._routes.bridge_port_of(address, route.ifindex)
            if port is None:
                await self._routes.solicit(address, route.ifindex)
                return _Evidence.MISSING, _UNRESOLVED
            if port in interfaces:
                return _Evidence.CONFIRMED, ""
            return _Evidence.FOREIGN, "behind another port of the node's bridge"
        return _Evidence.ELSEWHERE, "routed by the node through another interface"

    def _withdraw(self, uid: str) -> None:
        for address in self._reported_of.pop(uid, ()):
            pods = self._reported_for[address]
            pods.pop(uid, None)
            if not pods:
                del self._reported_for[address]


def _kind(why: str) -> str:
    return _OF_POD if why.startswith(_OF_POD) else why

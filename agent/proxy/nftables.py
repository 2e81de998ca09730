"""Services by nftables: a table of our own in the node's network namespace.

One look-up tells what a place is and one more which endpoint it gets, however many services there
are: chains exist for each *number* of endpoints and not for each service. Only services with
session affinity have chains and sets of their own, as in kube-proxy. Each change is one
transaction.
"""

import asyncio
import collections
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog
from pyroute2.netlink.exceptions import NetlinkError

from agent.linux import nft
from agent.proxy import conntrack
from agent.proxy.backends import BackendError
from agent.proxy.frontends import Change, Frontend
from agent.proxy.nft_entries import Chain, Clients, Element, Entry, entries_of, ready_chains
from bpf.abi import IPNetwork
from bpf.services.tables import ServiceAddress

log = structlog.get_logger(__name__)

TABLE = "podgate-proxy"

# Clients that a service remembers for each endpoint; whoever finds no room gets any endpoint.
_MAX_CLIENTS = 65536


class NftBackend:
    """The table. pod_networks: of this node's pods or all pods; what comes from elsewhere is from
    outside of the cluster."""

    def __init__(self, pod_networks: Sequence[IPNetwork] = ()) -> None:
        self._pod_networks = tuple(pod_networks)
        self._standing: dict[ServiceAddress, Frontend] = {}
        self._users: collections.Counter[Entry] = collections.Counter()
        self._is_whole = False

    async def change(self, change: Change) -> None:
        moved: collections.Counter[Entry] = collections.Counter()
        for place in (*change.changed, *change.gone):
            if place in self._standing:
                moved.subtract(entries_of(place, self._standing[place]))
        for place, frontend in change.changed.items():
            moved.update(entries_of(place, frontend))
        try:
            await nft.apply(self._script(moved))
        except (nft.NftError, TimeoutError) as error:
            # What stands is not known: next time all of it is written.
            self._is_whole = False
            words = str(error) or "nft did not answer in time"
            raise BackendError(f"nftables refused the services: {words}") from error
        self._is_whole = True
        self._users.update(moved)
        for entry in moved:
            if not self._users[entry]:
                del self._users[entry]
        left = {
            place: change.changed[place].endpoints if place in change.changed else ()
            for place in (*change.changed, *change.gone)
            if place.protocol == socket.IPPROTO_UDP
        }
        self._standing |= change.changed
        for place in change.gone:
            self._standing.pop(place, None)
        try:
            await asyncio.to_thread(conntrack.forget, left)
        except (OSError, NetlinkError) as error:
            log.warning("datagrams may still go where they went before", reason=str(error))

    async def close(self) -> None:
        """Nothing is held."""

    def _script(self, moved: Mapping[Entry, int]) -> str:
        users = self._users
        added = [entry for entry, more in moved.items() if users[entry] + more > 0 >= users[entry]]
        gone = [entry for entry, more in moved.items() if users[entry] > 0 >= users[entry] + more]
        is_late = any(isinstance(entry, Chain) and entry.is_late for entry in added)
        if self._is_whole and not is_late:
            return removal_of(gone) + addition_of(added)
        return whole((users.keys() - gone) | set(added), self._pod_networks)


async def remove() -> None:
    """Take the table away, whoever put it there. Raises `BackendError`."""
    try:
        if f"table inet {TABLE}" in (await nft.ask("list", "tables")).splitlines():
            await nft.apply(f"delete table inet {TABLE}\n")
    except nft.NftMissing:
        return
    except (nft.NftError, TimeoutError) as error:
        raise BackendError(
            f"the proxy's nftables cannot be removed: {error}; try 'nft delete table inet {TABLE}'"
        ) from error


def whole(entries: Iterable[Entry], pod_networks: Collection[IPNetwork]) -> str:
    """A script that puts the whole table in the place of whatever is there."""
    return (
        f"add table inet {TABLE}\ndelete table inet {TABLE}\n"
        + _frame(pod_networks)
        + addition_of(ready_chains())
        + addition_of(entries)
    )


def addition_of(entries: Iterable[Entry]) -> str:
    """What is referred to comes before what refers to it."""
    chains, sets, elements = _sorted(entries)
    lines = [
        f"add set inet {TABLE} {clients.name} {{ type {clients.type}; flags dynamic, timeout; "
        f"timeout {clients.seconds}s; size {_MAX_CLIENTS}; }}"
        for clients in sets
    ]
    for chain in chains:
        lines.append(f"add chain inet {TABLE} {chain.name}")
        lines += (f"add rule inet {TABLE} {chain.name} {rule}" for rule in chain.rules)
    lines += (
        f"add element inet {TABLE} {container} {{ "
        + ", ".join(f"{e.key} : {e.value}" if e.value else e.key for e in own)
        + " }"
        for container, own in elements.items()
    )
    return "".join(f"{line}\n" for line in lines)


def removal_of(entries: Iterable[Entry]) -> str:
    """The opposite order."""
    chains, sets, elements = _sorted(entries)
    lines = [
        f"delete element inet {TABLE} {container} {{ "
        + ", ".join(f"{e.key} : {e.value}" if e.value else e.key for e in own)
        + " }"
        for container, own in elements.items()
    ]
    for chain in reversed(chains):
        lines.append(f"flush chain inet {TABLE} {chain.name}")
        lines.append(f"delete chain inet {TABLE} {chain.name}")
    lines += (f"delete set inet {TABLE} {clients.name}" for clients in sets)
    return "".join(f"{line}\n" for line in lines)


def _sorted(
    entries: Iterable[Entry],
) -> tuple[list[Chain], list[Clients], dict[str, list[Element]]]:
    chains: list[Chain] = []
    sets: list[Clients] = []
    elements: dict[str, list[Element]] = collections.defaultdict(list)
    for entry in entries:
        if isinstance(entry, Element):
            elements[entry.container].append(entry)
        elif isinstance(entry, Chain):
            chains.append(entry)
        else:
            sets.append(entry)
    return sorted(chains, key=lambda chain: chain.rank), sets, elements


def _frame(pod_networks: Collection[IPNetwork]) -> str:
    """The table without services.

    0x4000 marks what is to be masqueraded, as with kube-proxy, and is taken off again.
    """
    return f"""table inet {TABLE} {{
{"".join(_containers(ip, version, pod_networks) for ip, version in (("ip", 4), ("ip6", 6)))}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain sources {{
    type filter hook prerouting priority -110; policy accept;
    ip daddr . meta l4proto . th dport vmap @sources4
    ip6 daddr . meta l4proto . th dport vmap @sources6
  }}
  chain from_node {{
{_masking(pod_networks)}    ip daddr . meta l4proto . th dport vmap @services4
    ip6 daddr . meta l4proto . th dport vmap @services6
  }}
  chain prerouting {{
    type nat hook prerouting priority -100; policy accept;
    ip saddr @pods4 goto from_node
    ip6 saddr @pods6 goto from_node
    ip daddr . meta l4proto . th dport vmap @outside4
    ip6 daddr . meta l4proto . th dport vmap @outside6
    goto from_node
  }}
  chain output {{
    type nat hook output priority -100; policy accept;
    goto from_node
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    meta mark & 0x4000 == 0x4000 meta mark set meta mark & 0xffffbfff masquerade fully-random
    ct status & dnat == dnat ip saddr . ip daddr @hairpin4 masquerade fully-random
    ct status & dnat == dnat ip6 saddr . ip6 daddr @hairpin6 masquerade fully-random
  }}
  chain refused {{
    ip daddr . meta l4proto . th dport vmap @refused4
    ip6 daddr . meta l4proto . th dport vmap @refused6
    ip daddr @cluster_ips4 goto refuse
    ip6 daddr @cluster_ips6 goto refuse
  }}
  chain refused_outside {{
    ip saddr @pods4 goto refused
    ip6 saddr @pods6 goto refused
    ip daddr . meta l4proto . th dport vmap @refused_outside4
    ip6 daddr . meta l4proto . th dport vmap @refused_outside6
    goto refused
  }}
  chain filter_input {{
    type filter hook input priority 0; policy accept;
    iif != lo ct state new goto refused_outside
  }}
  chain filter_forward {{
    type filter hook forward priority 0; policy accept;
    ct state new goto refused_outside
  }}
  chain filter_output {{
    type filter hook output priority 0; policy accept;
    ct state new goto refused
  }}
}}
"""


def _masking(pod_networks: Collection[IPNetwork]) -> str:
    """With pods' networks known, what others send to cluster IPs is masqueraded, the node's own
    included: its source was chosen for another way out (kube-proxy, with --cluster-cidr)."""
    if not pod_networks:
        return ""
    return "".join(
        f"    {ip} daddr @cluster_ips{version} {ip} saddr != @pods{version} "
        "meta mark set meta mark | 0x4000\n"
        for ip, version in (("ip", 4), ("ip6", 6))
        if any(network.version == version for network in pod_networks)
    )


def _containers(ip: str, version: int, pod_networks: Collection[IPNetwork]) -> str:
    place = f"ipv{version}_addr . inet_proto . inet_service"
    number = "numgen random mod 65536"
    key = f"{ip} daddr . meta l4proto . th dport . {number}"
    endpoint = f"typeof {key} : {ip} daddr . th dport"
    pods = ", ".join(str(network) for network in pod_networks if network.version == version)
    verdicts = ("services", "outside", "refused", "refused_outside", "sources")
    return "".join(
        (
            *(f"  map {name}{version} {{ type {place} : verdict; }}\n" for name in verdicts),
            *(
                f"  map {name}{version} {{ {endpoint}; }}\n"
                for name in ("endpoints", "outside_endpoints")
            ),
            f"  set cluster_ips{version} {{ type ipv{version}_addr; }}\n",
            f"  set hairpin{version} {{ type ipv{version}_addr . ipv{version}_addr; }}\n",
            f"  set pods{version} {{ type ipv{version}_addr; flags interval; "
            + (f"elements = {{ {pods} }}; " if pods else "")
            + "}\n",
        )
    )

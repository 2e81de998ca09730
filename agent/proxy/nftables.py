"""The nftables backend: a separate table in the node's network namespace.

One lookup finds the service of an address and one more its endpoint, for any number of services:
chains exist for each *number* of endpoints and not for each service. Only services with session
affinity have their own chains and sets, as in kube-proxy. Each change is one transaction.
"""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence

from agent.linux import nft
from agent.proxy import conntrack
from agent.proxy.backends import BackendError
from agent.proxy.frontends import Frontend, FrontendChange
from agent.proxy.nft_entries import (
    AffinitySet,
    Entry,
    NftChain,
    NftElement,
    entries_of,
    ready_chains,
)
from bpf.abi import IPNetwork
from bpf.services.tables import ServiceAddress

TABLE = "podgate-proxy"

# Clients with affinity to one endpoint; further ones get any endpoint.
_MAX_CLIENTS = 65536


class NftBackend:
    """Maintains the table. pod_networks: of this node's pods or all pods; traffic from other
    sources is external."""

    def __init__(self, pod_networks: Sequence[IPNetwork] = ()) -> None:
        self._pod_networks = tuple(pod_networks)
        self._installed: dict[ServiceAddress, Frontend] = {}
        self._users: collections.Counter[Entry] = collections.Counter()
        self._is_complete = False

    async def apply(self, change: FrontendChange) -> None:
        moved: collections.Counter[Entry] = collections.Counter()
        for address in (*change.changed, *change.removed):
            if address in self._installed:
                moved.subtract(entries_of(address, self._installed[address]))
        for address, frontend in change.changed.items():
            moved.update(entries_of(address, frontend))
        try:
            await nft.apply(self._script(moved))
        except (nft.NftError, TimeoutError) as error:
            # The installed state is unknown: the next change writes the whole table.
            self._is_complete = False
            reason = str(error) or "nft timed out"
            raise BackendError(f"nft cannot apply the services: {reason}") from error
        self._is_complete = True
        self._users.update(moved)
        for entry in moved:
            if not self._users[entry]:
                del self._users[entry]
        self._installed |= change.changed
        for address in change.removed:
            self._installed.pop(address, None)
        await conntrack.follow(change)

    async def close(self) -> None:
        """The backend has nothing open."""

    def _script(self, moved: Mapping[Entry, int]) -> str:
        users = self._users
        added = [entry for entry, more in moved.items() if users[entry] + more > 0 >= users[entry]]
        removed = [
            entry for entry, more in moved.items() if users[entry] > 0 >= users[entry] + more
        ]
        is_late = any(isinstance(entry, NftChain) and entry.is_late for entry in added)
        if self._is_complete and not is_late:
            return removal_of(removed) + addition_of(added)
        return full_ruleset((users.keys() - removed) | set(added), self._pod_networks)


async def remove() -> None:
    """Remove the table, also that of another process. Raises `BackendError`."""
    try:
        if f"table inet {TABLE}" in (await nft.query("list", "tables")).splitlines():
            await nft.apply(f"delete table inet {TABLE}\n")
    except nft.NftMissingError:
        return
    except (nft.NftError, TimeoutError) as error:
        raise BackendError(
            f"the proxy's nftables cannot be removed: {error}; try 'nft delete table inet {TABLE}'"
        ) from error


def full_ruleset(entries: Iterable[Entry], pod_networks: Collection[IPNetwork]) -> str:
    """A script that replaces the whole table."""
    return (
        f"add table inet {TABLE}\ndelete table inet {TABLE}\n"
        + _frame(pod_networks)
        + addition_of(ready_chains())
        + addition_of(entries)
    )


def addition_of(entries: Iterable[Entry]) -> str:
    """A script that adds entries, each after those that it refers to."""
    chains, sets, elements = _sorted(entries)
    lines = [
        f"add set inet {TABLE} {affinity.name} {{ type {affinity.type}; flags dynamic, timeout; "
        f"timeout {affinity.seconds}s; size {_MAX_CLIENTS}; }}"
        for affinity in sets
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
    """A script that removes entries, in the opposite order."""
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
    lines += (f"delete set inet {TABLE} {affinity.name}" for affinity in sets)
    return "".join(f"{line}\n" for line in lines)


def _sorted(
    entries: Iterable[Entry],
) -> tuple[list[NftChain], list[AffinitySet], dict[str, list[NftElement]]]:
    chains: list[NftChain] = []
    sets: list[AffinitySet] = []
    elements: dict[str, list[NftElement]] = collections.defaultdict(list)
    for entry in entries:
        if isinstance(entry, NftElement):
            elements[entry.container].append(entry)
        elif isinstance(entry, NftChain):
            chains.append(entry)
        else:
            sets.append(entry)
    return sorted(chains, key=lambda chain: chain.rank), sets, elements


def _frame(pod_networks: Collection[IPNetwork]) -> str:
    """The table without services.

    0x4000 marks packets to be masqueraded, as with kube-proxy, and is removed again.
    """
    return f"""table inet {TABLE} {{
{"".join(_containers(ip, version, pod_networks) for ip, version in (("ip", 4), ("ip6", 6)))}
  chain reject_traffic {{
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
  chain check_endpoints {{
    ip daddr . meta l4proto . th dport vmap @no_endpoints4
    ip6 daddr . meta l4proto . th dport vmap @no_endpoints6
    ip daddr @cluster_ips4 goto reject_traffic
    ip6 daddr @cluster_ips6 goto reject_traffic
  }}
  chain check_endpoints_outside {{
    ip saddr @pods4 goto check_endpoints
    ip6 saddr @pods6 goto check_endpoints
    ip daddr . meta l4proto . th dport vmap @no_endpoints_outside4
    ip6 daddr . meta l4proto . th dport vmap @no_endpoints_outside6
    goto check_endpoints
  }}
  chain filter_input {{
    type filter hook input priority 0; policy accept;
    iif != lo ct state new goto check_endpoints_outside
  }}
  chain filter_forward {{
    type filter hook forward priority 0; policy accept;
    ct state new goto check_endpoints_outside
  }}
  chain filter_output {{
    type filter hook output priority 0; policy accept;
    ct state new goto check_endpoints
  }}
}}
"""


def _masking(pod_networks: Collection[IPNetwork]) -> str:
    """With pod networks, traffic from other sources to cluster IPs is masqueraded.

    That includes the node's own: its source address was chosen for another route (kube-proxy, with
    --cluster-cidr).
    """
    if not pod_networks:
        return ""
    return "".join(
        f"    {ip} daddr @cluster_ips{version} {ip} saddr != @pods{version} "
        "meta mark set meta mark | 0x4000\n"
        for ip, version in (("ip", 4), ("ip6", 6))
        if any(network.version == version for network in pod_networks)
    )


def _containers(ip: str, version: int, pod_networks: Collection[IPNetwork]) -> str:
    address = f"ipv{version}_addr . inet_proto . inet_service"
    number = "numgen random mod 65536"
    key = f"{ip} daddr . meta l4proto . th dport . {number}"
    endpoint = f"typeof {key} : {ip} daddr . th dport"
    pods = ", ".join(str(network) for network in pod_networks if network.version == version)
    verdicts = ("services", "outside", "no_endpoints", "no_endpoints_outside", "sources")
    return "".join(
        (
            *(f"  map {name}{version} {{ type {address} : verdict; }}\n" for name in verdicts),
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

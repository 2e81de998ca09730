"""Scripts for nft: the table without services, and entries that are added or removed."""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable

import msgspec

from agent.services.proxy.nft_entries import (
    AFFINITY_PREFIX,
    AffinitySet,
    Entry,
    NftChain,
    NftElement,
    ready_chains,
)
from bpf.abi import IPNetwork

TABLE = "podgate-proxy"

FRAME_CHAINS = frozenset(
    {"reject_traffic", "sources", "from_node", "check_endpoints", "check_endpoints_outside"}
)
"""Chains of every table that are no base chains."""

# Clients with affinity to one endpoint; further ones get any endpoint.
_MAX_CLIENTS = 65536


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledTable:
    """The names of a table's parts."""

    base_chains: set[str]
    chains: set[str]
    """All others."""
    maps: set[str]
    affinity_sets: set[str]
    other_sets: set[str]
    rules: collections.Counter[str]
    """Number of rules by chain."""


class _Named(msgspec.Struct):
    name: str


class _Rule(msgspec.Struct):
    chain: str


class _NamedChain(_Named):
    hook: str = ""


class _Listed(msgspec.Struct):
    chain: _NamedChain | None = None
    map: _Named | None = None
    set: _Named | None = None
    rule: _Rule | None = None


class _Listing(msgspec.Struct):
    nftables: list[_Listed]


def table_of(listing: str) -> InstalledTable:
    """The table in the output of `nft --json list table`. Raises `msgspec.MsgspecError`."""
    parts = msgspec.json.decode(listing, type=_Listing).nftables
    sets = {part.set.name for part in parts if part.set}
    affine = {name for name in sets if name.startswith(AFFINITY_PREFIX)}
    return InstalledTable(
        base_chains={part.chain.name for part in parts if part.chain and part.chain.hook},
        chains={part.chain.name for part in parts if part.chain and not part.chain.hook},
        maps={part.map.name for part in parts if part.map},
        affinity_sets=affine,
        other_sets=sets - affine,
        rules=collections.Counter(part.rule.chain for part in parts if part.rule),
    )


def full_ruleset(
    entries: Iterable[Entry],
    pod_networks: Collection[IPNetwork],
    installed: InstalledTable | None = None,
) -> str:
    """A script that replaces the whole table.

    installed: keep the sets of clients with affinity, with the time that each client has left. A
    set's name has a digest of its declaration, so one of the same name is the same set. Chains that
    are no longer used stay, without rules.
    """
    entries = list(entries)
    if installed is None:
        clearance = f"add table inet {TABLE}\ndelete table inet {TABLE}\n"
    else:
        clearance = _clearance(
            installed, {entry.name for entry in entries if isinstance(entry, AffinitySet)}
        )
    return clearance + _frame(pod_networks) + addition_of(ready_chains()) + addition_of(entries)


def unused_chains(installed: InstalledTable, entries: Iterable[Entry]) -> set[str]:
    """Chains that `full_ruleset` leaves without rules."""
    used = {entry.name for entry in (*ready_chains(), *entries) if isinstance(entry, NftChain)}
    return installed.chains - used - FRAME_CHAINS


def _clearance(installed: InstalledTable, kept: set[str]) -> str:
    """A script that removes all of a table but the affinity sets that are kept, and chains.

    Chains refer to sets and maps, and verdict maps to chains: all are empty before one is deleted.
    """
    unused = installed.affinity_sets - kept
    lines = [
        *(f"flush chain inet {TABLE} {name}" for name in installed.base_chains | installed.chains),
        *(f"flush map inet {TABLE} {name}" for name in installed.maps),
        *(f"delete chain inet {TABLE} {name}" for name in installed.base_chains),
        *(f"delete map inet {TABLE} {name}" for name in installed.maps),
        *(f"delete set inet {TABLE} {name}" for name in installed.other_sets | unused),
    ]
    return "".join(f"{line}\n" for line in lines)


def deletion_of(chains: Iterable[str]) -> str:
    """A script that deletes chains without rules.

    A transaction of its own: before Linux 6.2 a chain counts as used for a moment after the map
    element that refers to it was deleted (kube-proxy, pkg/proxy/nftables, `staleChains`).
    """
    return "".join(f"delete chain inet {TABLE} {name}\n" for name in sorted(chains))


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
    """A script that removes entries, in the opposite order; chains stay, without rules."""
    chains, sets, elements = _sorted(entries)
    lines = [
        f"delete element inet {TABLE} {container} {{ "
        + ", ".join(f"{e.key} : {e.value}" if e.value else e.key for e in own)
        + " }"
        for container, own in elements.items()
    ]
    lines += (f"flush chain inet {TABLE} {chain.name}" for chain in reversed(chains))
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
    ip daddr . meta l4proto . th dport vmap @sources4
    ip6 daddr . meta l4proto . th dport vmap @sources6
  }}
  chain sources_prerouting {{
    type filter hook prerouting priority -110; policy accept;
    ct state new goto sources
  }}
  chain sources_output {{
    type filter hook output priority -110; policy accept;
    ct state new goto sources
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


BASE_CHAINS = frozenset(re.findall(r"chain (\w+) \{\s+type \w+ hook", _frame(())))
"""Chains of every table that the kernel calls."""

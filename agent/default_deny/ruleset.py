"""The backstop's nftables ruleset as text: what it drops, and why it can touch nothing else.

Three chains. A packet that opens a conversation is *tagged* where its socket can still be asked
for its cgroup, and judged where its way out is known for good:

* `inet output`, the last there: tags what a process of the node opens, unless the kubelet did. Only
  packets with a process's socket: what IP virtual server (IPVS) forwards comes through this hook
  too, as does SYNPROXY's own SYN, and neither has one.
* `inet postrouting`, the first there, since only after output is the interface known of what was
  sent to a service's address and translated. Drops tagged packets to veths in no set; unties the
  tag from all others but those to a bridge. Nothing runs between these two hooks, so nobody else
  sees the tag.
* `bridge output` does the same for the ports of bridges. The tag, unlike the socket, is on every
  copy that a bridge floods.

A kubelet that restarts while no agent lives has a cgroup that nobody admitted, and would fail the
probes of every pod born since: when the heartbeat has been missing for long, TCP from processes
outside of pods' cgroups passes (chain `orphaned`, counted).

So forwarded packets, bridged or routed, are never tagged and never judged.

An opening packet of TCP is SYN without ACK, and every fragment that a raw socket makes (processes'
own packets are cut up after these hooks). Other protocols begin where connection tracking says so;
where nothing is tracked, they pass: our asking would switch tracking on for every packet of the
node. Replies to what a pod asked, untracked packets (NodeLocal DNSCache), ICMP errors, neighbour
discovery, IGMP, MLD, DHCP's answers, multicast and broadcast always pass.
"""

import dataclasses
import json
from collections.abc import Iterable

TABLE = "podgate"
FAMILIES = ("inet", "bridge")
GATED = "gated"
NOT_PODS = "not_pods"

# The upper half of the packet's mark while it is tagged; the lower half, where kube-proxy (0x4000,
# 0x8000) and most others keep their bits, stays as it is. As a Cilium identity it would be a
# reserved one (below 256) that is not given out; Calico's bits never come in this combination.
TAG = 0x00E7_0000
_TAGGED = 0xFFFF_0000
_REST = 0x0000_FFFF

# What tracking calls new is a conversation's first packet, an echo request included; errors,
# answers and neighbour discovery are not. It cannot match a broadcast with its answers.
_DATAGRAMS = """\
    udp sport . udp dport { 67 . 68, 547 . 546 } accept
    ip daddr { 224.0.0.0/4, 255.255.255.255 } accept
    ip6 daddr ff00::/8 accept
    ct state new goto tag
"""

_LATEST = 10_000
"""After everything that ships: NAT -100, filter 0, security 50, connection tracking helpers 300."""

_EARLIEST = -10_000
"""Before everything that ships: raw -300, mangle -150."""


@dataclasses.dataclass(slots=True)
class Ruleset:
    """All that the tables should say."""

    gated: set[int] = dataclasses.field(default_factory=set)
    not_pods: set[int] = dataclasses.field(default_factory=set)
    kubelet: str | None = None
    """What matches its sockets, of `agent.linux.nft_cgroups`."""
    pods: tuple[str, ...] = ()
    """What matches sockets of pods' processes, those of hostNetwork pods included."""
    stale_seconds: int = 60
    """Without a heartbeat for so long, processes outside of pods count as the kubelet."""
    has_bridge: bool = True
    """Whether this kernel filters bridges with nftables."""
    tracks: bool = True
    """Whether to ask connection tracking about what is not TCP."""

    def text(self) -> str:
        """A script that puts the tables there, in the place of any that are."""
        return removal() + self._inet() + (self._bridge() if self.has_bridge else "")

    def changes(self, *, add: dict[int, str], delete: dict[int, str]) -> str:
        """A script that moves interfaces between the sets: interface number -> set's name."""
        families = FAMILIES if self.has_bridge else FAMILIES[:1]
        return "".join(
            f"{verb} element {family} {TABLE} {name} {{ {_element(ifindex)} }}\n"
            for verb, changes in (("delete", delete), ("add", add))
            for family in families
            for ifindex, name in sorted(changes.items())
        )

    def admission(self) -> str:
        """A script that admits the kubelet that there is now, and no other."""
        return f"flush chain inet {TABLE} kubelet\n" + "".join(
            f"add rule inet {TABLE} kubelet {rule}\n" for rule in self._kubelet_rules()
        )

    def heartbeat(self) -> str:
        """A script that starts the time to staleness anew. An element that is there keeps its
        time when it is added (Linux before 6.12), so it goes first."""
        return (
            f"add element inet {TABLE} alive {{ {self._alive()} }}\n"
            f"delete element inet {TABLE} alive {{ ipv4, ipv6 }}\n"
            f"add element inet {TABLE} alive {{ {self._alive()} }}\n"
        )

    def chains(self) -> list[tuple[str, str, str]]:
        """Family, table and name of every chain that names no cgroup."""
        names = ("tag", "opening", "output", "postrouting")
        chains = [("inet", TABLE, name) for name in names]
        return [*chains, ("bridge", TABLE, "output")] if self.has_bridge else chains

    def _kubelet_rules(self) -> list[str]:
        return [] if self.kubelet is None else [f"{self.kubelet} accept"]

    def _alive(self) -> str:
        return ", ".join(f"{family} timeout {self.stale_seconds}s" for family in ("ipv4", "ipv6"))

    def _sets(self) -> str:
        lines = []
        for name, ifindexes in ((GATED, self.gated), (NOT_PODS, self.not_pods)):
            elements = ", ".join(map(_element, sorted(ifindexes)))
            filled = f"elements = {{ {elements} }};" if ifindexes else ""
            lines.append(f"  set {name} {{ type iface_index; {filled} }}\n")
        return "".join(lines)

    def _inet(self) -> str:
        pods = "".join(f"    {match} return\n" for match in self.pods)
        kubelet = "".join(f"    {rule}\n" for rule in self._kubelet_rules())
        return f"""table inet {TABLE} {{
{self._sets()}
  set alive {{ type nf_proto; flags timeout; elements = {{ {self._alive()} }}; }}
  chain kubelet {{
{kubelet}  }}
  chain orphaned {{
{pods}    meta l4proto tcp counter accept
  }}
  chain tag {{
    jump kubelet
    meta nfproto != @alive jump orphaned
    meta mark set meta mark & {_REST:#010x} | {TAG:#010x}
  }}
  chain opening {{
    tcp flags & (syn | ack) == syn goto tag
    meta l4proto tcp ip frag-off & 0x3fff != 0 goto tag
    meta l4proto tcp exthdr frag exists goto tag
    meta l4proto tcp accept
{_DATAGRAMS if self.tracks else ""}  }}
  chain output {{
    type filter hook output priority {_LATEST}; policy accept;
    tcp flags & (syn | ack) != syn accept
    meta skuid >= 0 jump opening
  }}
  chain postrouting {{
    type filter hook postrouting priority {_EARLIEST}; policy accept;
    meta mark & {_TAGGED:#010x} != {TAG:#010x} accept
    iif != 0 accept
    meta oifkind "veth" oif != @{GATED} oif != @{NOT_PODS} counter drop
{'    meta oifkind "bridge" accept' if self.has_bridge else ""}
    meta mark set meta mark & {_REST:#010x}
  }}
}}
"""

    def _bridge(self) -> str:
        return f"""table bridge {TABLE} {{
{self._sets()}
  chain output {{
    type filter hook output priority {_EARLIEST}; policy accept;
    meta mark & {_TAGGED:#010x} != {TAG:#010x} accept
    meta oifkind "veth" oif != @{GATED} oif != @{NOT_PODS} counter drop
    meta mark set meta mark & {_REST:#010x}
  }}
}}
"""


def removal(families: tuple[str, ...] = FAMILIES) -> str:
    """A script after which no table of ours is there; deleting wants one, so it is added first."""
    return "".join(
        f"add table {family} {TABLE}\ndelete table {family} {TABLE}\n" for family in families
    )


def elements_of(text: str, interfaces: Iterable[tuple[int, str]]) -> set[int]:
    """Numbers of the existing interfaces in a set, as `nft --json list set` prints it."""
    by_name = {name: ifindex for ifindex, name in interfaces}
    elements = next(
        entry["set"].get("elem", []) for entry in json.loads(text)["nftables"] if "set" in entry
    )
    # Those that are gone are printed as numbers.
    return {by_name[element] for element in elements if element in by_name}


def _element(ifindex: int) -> str:
    # Longer than any interface's name: nft takes a short number for a name if there is such a one.
    return f'"{ifindex:020d}"'

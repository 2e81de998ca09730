"""The ruleset of the default-deny table as text: what it drops, and why all else passes.

It has three base chains. The first packet of a flow is *tagged* where its socket, and so its
cgroup, is available; it passes or is dropped where its final interface is known:

* `inet output`, last of its hook, tags new flows of host processes except the kubelet. It tags only
  packets with a process's socket: packets that IP virtual server (IPVS) forwards and the SYN that
  SYNPROXY makes also run through this hook, and have none.
* `inet postrouting`, first of its hook, because a packet to a service's address gets its interface
  only when it is translated, which is after output. It drops tagged packets to veths that are in no
  set, and clears the tag of all others, except those to a bridge. No other program sees the tag:
  nothing runs between these two hooks. It also tags what came in by the loopback and is routed
  on: a packet socket has put it there.
* `bridge output` does the same for the ports of bridges. A bridge that floods a packet copies the
  tag, but not the socket.

Other forwarded packets, bridged or routed, are never tagged, so they always pass.

A kubelet that restarts while no agent runs gets a cgroup that is not admitted, and would fail the
probes of every pod created since. Where the kernel follows it, the connect hooks give its sockets a
priority that the table admits. Elsewhere, when the heartbeat has been missing for long, TCP from
processes outside of pods' cgroups passes (chain `orphaned`, counted).

For TCP, a new flow is a SYN without ACK, or any fragment, since only raw sockets send fragments
through these hooks: the kernel fragments other packets later. For other protocols, connection
tracking determines it. Where nothing is tracked, they pass: a rule that matches the tracking state
would switch tracking on for every packet of the node. Replies to a pod's requests, untracked
packets (NodeLocal DNSCache), ICMP errors, neighbour discovery, IGMP, MLD, DHCP replies, multicast
and broadcast always pass.
"""

import dataclasses
import json
from collections.abc import Iterable

TABLE = "podgate"
FAMILIES = ("inet", "bridge")
GATED = "gated"
NOT_PODS = "not_pods"

# The upper half of the packet's mark while it is tagged. The lower half, where kube-proxy (0x4000,
# 0x8000) and most others keep their bits, does not change. As a Cilium identity it would be a
# reserved one (below 256) that is not assigned; Calico never sets its bits in this combination.
TAG = 0x00E7_0000
_TAGGED = 0xFFFF_0000
_REST = 0x0000_FFFF

# In tracking, the first packet of a flow is `new`, an echo request included; errors, replies and
# neighbour discovery are not. It cannot match a broadcast with its replies.
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
    """The desired content of the tables."""

    gated: set[int] = dataclasses.field(default_factory=set)
    not_pods: set[int] = dataclasses.field(default_factory=set)
    kubelet: str | None = None
    """An nft expression that matches its sockets, made by `agent.linux.nft_cgroups`."""
    is_kubelet_unknown: bool = False
    """Whether processes outside of pods count as the kubelet, with or without a heartbeat."""
    pods: tuple[str, ...] = ()
    """Expressions that match sockets of pods' processes, hostNetwork pods included."""
    stale_seconds: int = 60
    """After this time without a heartbeat, processes outside of pods count as the kubelet."""
    abandoned_seconds: int = 86_400
    """The same where the kernel follows the kubelet, as gates open by then; 0: never."""
    priority: int | None = None
    """Priority of the sockets of a kubelet that the kernel has followed; None: it cannot."""
    has_bridge: bool = True
    """Whether this kernel filters bridges with nftables."""
    tracks: bool = True
    """Whether rules use connection tracking, which protocols other than TCP need."""

    def text(self) -> str:
        """A script that installs the tables and replaces existing ones."""
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
        """A script that admits the current kubelet only."""
        return f"flush chain inet {TABLE} kubelet\n" + "".join(
            f"add rule inet {TABLE} kubelet {rule}\n" for rule in self._kubelet_rules()
        )

    def heartbeat(self) -> str:
        """A script that restarts the time to staleness. Adding an existing element does not renew
        its timeout (Linux before 6.12), so the script deletes it first."""
        return (
            f"add element inet {TABLE} alive {{ {self._alive()} }}\n"
            f"delete element inet {TABLE} alive {{ ipv4, ipv6 }}\n"
            f"add element inet {TABLE} alive {{ {self._alive()} }}\n"
        )

    def chains(self) -> list[tuple[str, str, str]]:
        """Family, table and name of every chain without a cgroup in its rules."""
        names = ("tag", "opening", "output", "postrouting")
        chains = [("inet", TABLE, name) for name in names]
        return [*chains, ("bridge", TABLE, "output")] if self.has_bridge else chains

    def _kubelet_rules(self) -> list[str]:
        rules = ["jump orphaned"] if self.is_kubelet_unknown else []
        if self.kubelet is not None:
            rules.append(f"{self.kubelet} accept")
        if self.priority is not None:
            # Cleared: captures and queues must not see it.
            match = (
                f"meta l4proto tcp meta priority {self.priority >> 16:x}:{self.priority & 0xFFFF:x}"
            )
            rules.append(f"{match} meta priority set none counter accept")
        return rules

    def _alive(self) -> str:
        seconds = self.stale_seconds if self.priority is None else self.abandoned_seconds
        timeout = f" timeout {seconds}s" if seconds else ""
        return ", ".join(f"{family}{timeout}" for family in ("ipv4", "ipv6"))

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
    iif "lo" meta mark set meta mark & {_REST:#010x} | {TAG:#010x}
    meta mark & {_TAGGED:#010x} != {TAG:#010x} accept
    iif != {{ 0, "lo" }} accept
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
    """A script that removes our tables. It adds each first: deleting a missing one fails."""
    return "".join(
        f"add table {family} {TABLE}\ndelete table {family} {TABLE}\n" for family in families
    )


def elements_of(text: str, interfaces: Iterable[tuple[int, str]]) -> set[int]:
    """Numbers of the existing interfaces in a set, as `nft --json list set` prints it."""
    by_name = {name: ifindex for ifindex, name in interfaces}
    elements = next(
        entry["set"].get("elem", []) for entry in json.loads(text)["nftables"] if "set" in entry
    )
    # nft prints interfaces that no longer exist as numbers.
    return {by_name[element] for element in elements if element in by_name}


def _element(ifindex: int) -> str:
    # Longer than any interface name: nft reads a short number as a name if an interface has it.
    return f'"{ifindex:020d}"'

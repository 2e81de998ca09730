"""What the network namespace has: default-deny tables, the sets of their interfaces, tracking."""

import dataclasses
import json
import pathlib
import re
import socket

from agent.default_deny import ruleset
from agent.linux import nft

# As nft prints it: relative to /sys/fs/cgroup.
_CGROUP = re.compile(r'socket cgroupv2 level \d+ "([^"]+)"')
_CONNTRACK_COUNT = pathlib.Path("/proc/sys/net/netfilter/nf_conntrack_count")


async def families() -> tuple[str, ...]:
    """The families that have a default-deny table, of any agent. Raises `NftError`."""
    lines = (await nft.query("list", "tables")).splitlines()
    return tuple(f for f in ruleset.FAMILIES if f"table {f} {ruleset.TABLE}" in lines)


async def interface_sets() -> tuple[set[int], set[int]] | None:
    """Gated and exempt interfaces that still exist; None if the table is missing or incomplete.

    Raises `NftMissingError`.
    """
    found = []
    for name in (ruleset.GATED, ruleset.NOT_PODS):
        try:
            text = await nft.query("--json", "list", "set", "inet", ruleset.TABLE, name)
        except nft.NftMissingError:
            raise
        except nft.NftError:
            return None
        found.append(ruleset.elements_of(text, socket.if_nameindex()))
    return found[0], found[1]


def tracks_connections() -> bool:
    """Whether this network namespace tracks connections: then its count is never 0."""
    try:
        return int(_CONNTRACK_COUNT.read_text()) > 0
    except (OSError, ValueError):
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Which new flows to unclassified interfaces the table admits. kubelet: path of the admitted
    cgroup, empty for none; has_priority: whether sockets with the kubelet's priority are; is_open:
    whether TCP of all processes outside pods is; is_alive: whether the table's own heartbeat is
    recent, as otherwise that is, too; covers_datagrams: whether protocols other than TCP are
    dropped."""

    kubelet: str
    has_priority: bool
    is_open: bool
    is_alive: bool
    covers_datagrams: bool


async def admission() -> Admission:
    """Raises `NftError`: the table is incomplete, or cannot be read."""
    kubelet = await nft.query("list", "chain", "inet", ruleset.TABLE, "kubelet")
    new_flows = await nft.query("list", "chain", "inet", ruleset.TABLE, "opening")
    alive = await nft.query("--json", "list", "set", "inet", ruleset.TABLE, "alive")
    path = _CGROUP.search(kubelet)
    return Admission(
        kubelet=f"/{path[1]}" if path else "",
        has_priority="meta priority" in kubelet,
        is_open="jump orphaned" in kubelet,
        is_alive=any(
            entry["set"].get("elem") for entry in json.loads(alive)["nftables"] if "set" in entry
        ),
        covers_datagrams="ct state" in new_flows,
    )

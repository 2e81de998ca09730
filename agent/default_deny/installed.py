"""What the network namespace has: default-deny tables, the sets of their interfaces, tracking."""

import json
import pathlib
import socket

from agent.default_deny import ruleset
from agent.linux import nft

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


async def is_alive() -> bool:
    """Whether the table's own heartbeat has not timed out. Raises `NftError`."""
    text = await nft.query("--json", "list", "set", "inet", ruleset.TABLE, "alive")
    return any(entry["set"].get("elem") for entry in json.loads(text)["nftables"] if "set" in entry)


async def covers_datagrams() -> bool:
    """Whether the table covers protocols other than TCP. Raises `NftError`."""
    return "ct state" in await nft.query("list", "chain", "inet", ruleset.TABLE, "opening")

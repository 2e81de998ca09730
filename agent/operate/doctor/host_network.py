"""Checks of the host's network namespace: what traffic may pass gates by, and what strict needs."""

import pathlib

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.default_deny import installed
from agent.gates import tun_interfaces
from agent.linux import nft, rtnetlink
from agent.linux.cgroups import cgroup2_mount
from agent.linux.node_routes import NodeRoutes
from agent.operate.doctor.results import Passed, Result
from agent.settings import RelayRanges
from agent.strict import check as strict_check
from bpf import pins


async def check(bpffs: pathlib.Path, ranges: RelayRanges) -> list[Result]:
    return [await _nftables(), await _tun_interfaces(), await _strict(bpffs, ranges)]


async def _nftables() -> Result:
    try:
        await nft.apply("add table inet podgate-doctor", only_check=True)
        has_table = "inet" in await installed.families()
    except (nft.NftError, TimeoutError) as error:
        return found(
            kinds.NFTABLES_MISSING,
            f"nft does not work ({error}): new pods are open until their gate is attached",
        )
    effect = "new pods are blocked until their gate is attached"
    if not has_table:
        effect = (
            "new pods are open until their gate is attached, since no default-deny table exists; "
            "the agent creates it where the node's default mode is enforce or strict"
        )
    return Passed("nftables", f"nftables works: {effect}.")


async def _tun_interfaces() -> Result:
    """A host process writes what comes from a tun interface, and may write its own packets."""
    routes = NodeRoutes()
    carrying = []
    try:
        for link in tun_interfaces.find_tuns(await rtnetlink.read()):
            forwarding = tun_interfaces.forwarding_routes(await routes.routes_by(link.index))
            if forwarding:
                networks = ", ".join(str(route.network) for route in forwarding[:3])
                carrying.append(f"{link.name} (routes to {networks})")
    except OSError as error:
        text = f"Cannot read tun interfaces and routes: {error}"
        return found(kinds.TUN_ROUTES, text, remedy="Retry.")
    if carrying:
        return found(
            kinds.TUN_ROUTES,
            f"Packets from {', '.join(carrying)} count as forwarded: a process that may write to "
            "such an interface reaches pods past their gates",
        )
    return Passed("tun", "No tun interface carries traffic of other networks.")


async def _strict(bpffs: pathlib.Path, ranges: RelayRanges) -> Result:
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    if problem := await strict_check.find_problem(ranges, root, pins.Pins(bpffs)):
        text = f"strict unavailable, falling back to enforce: {problem}"
        return found(kinds.RELAY_RANGES_TAKEN, text)
    return Passed("strict", f"Relay ranges {' and '.join(map(str, ranges.networks))} are free.")

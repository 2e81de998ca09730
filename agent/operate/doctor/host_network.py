"""Checks of the host's network namespace: what traffic may pass gates by, and what strict needs."""

import pathlib

from agent.gates import tun_interfaces
from agent.linux import nft, rtnetlink
from agent.linux.cgroups import cgroup2_mount
from agent.linux.node_routes import NodeRoutes
from agent.operate.doctor.finding import Finding, ok, warning
from agent.settings import RelayRanges
from agent.strict import check as strict_check
from bpf import pins


async def check(bpffs: pathlib.Path, ranges: RelayRanges) -> list[Finding]:
    return [await _nftables(), await _tun_interfaces(), await _strict(bpffs, ranges)]


async def _nftables() -> Finding:
    try:
        await nft.apply("add table inet podgate-doctor", only_check=True)
    except (nft.NftError, TimeoutError) as error:
        return warning(
            "nftables",
            f"nft does not work ({error}): new pods are open until their gate is attached.",
            "Install nftables.",
        )
    return ok("nftables", "nftables works: new pods are blocked until their gate is attached.")


async def _tun_interfaces() -> Finding:
    """A host process writes what comes from a tun interface, and may write its own packets."""
    routes = NodeRoutes()
    carrying = []
    try:
        for link in tun_interfaces.find_tuns(await rtnetlink.read()):
            found = tun_interfaces.forwarding_routes(await routes.routes_by(link.index))
            if found:
                networks = ", ".join(str(route.network) for route in found[:3])
                carrying.append(f"{link.name} (routes to {networks})")
    except OSError as error:
        return warning("tun", f"Cannot read tun interfaces and routes: {error}.", "Retry.")
    if carrying:
        return warning(
            "tun",
            f"Packets from {', '.join(carrying)} count as forwarded: a process that may write to "
            "such an interface reaches pods past their gates.",
            "Let only trusted processes open them (mode of /dev/net/tun, CAP_NET_ADMIN).",
        )
    return ok("tun", "No tun interface carries traffic of other networks.")


async def _strict(bpffs: pathlib.Path, ranges: RelayRanges) -> Finding:
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    if found := await strict_check.find_problem(ranges, root, pins.Pins(bpffs)):
        return warning(
            "strict",
            f"strict unavailable, falling back to enforce: {found}",
            "Solve that, or choose other ranges with --relay-range4 and --relay-range6.",
        )
    return ok("strict", f"Relay ranges {' and '.join(map(str, ranges.networks))} are free.")

"""The proxy's backends by name: how each is opened, and how what it installed is removed.

Each imports what it needs when it is used, so that the command line can read the names.
"""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from bpf import pins
from bpf.abi import IPNetwork

if TYPE_CHECKING:
    from agent.services.proxy.backend import Backend


@dataclasses.dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options of all backends; each has its own use for them.

    pod_networks: traffic from other sources is external; iptables_variant: a member's name of
    `IptablesVariant`, in lower case; cgroup: the sockets in it and below, None for all.
    """

    bpffs: pathlib.Path
    pod_networks: Sequence[IPNetwork] = ()
    iptables_variant: str = "default"
    cgroup: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BackendKind:
    """Both raise `BackendError`."""

    open: Callable[[BackendOptions], Coroutine[Any, Any, "Backend"]]
    remove: Callable[[BackendOptions], Coroutine[Any, Any, None]]


async def _open_ebpf(options: BackendOptions) -> "Backend":
    from agent.linux.cgroups import cgroup2_mount
    from agent.services.proxy.combined import CombinedBackend
    from agent.services.proxy.ebpf import EbpfBackend
    from agent.services.proxy.nftables import NftBackend

    root = options.cgroup or cgroup2_mount()
    assert root is not None  # `preflight.check`
    sockets = await EbpfBackend.open(options.bpffs, root)
    return await CombinedBackend.open(sockets, NftBackend(options.pod_networks))


async def _remove_ebpf(options: BackendOptions) -> None:
    from bpf.services import services

    await _remove_nft(options)
    await asyncio.to_thread(services.remove, pins.Pins(options.bpffs))


async def _open_nft(options: BackendOptions) -> "Backend":
    from agent.services.proxy.nftables import NftBackend

    return NftBackend(options.pod_networks)


async def _remove_nft(_: BackendOptions) -> None:
    from agent.services.proxy import nftables

    await nftables.remove()


async def _open_iptables(options: BackendOptions) -> "Backend":
    from agent.services.linux.iptables import IptablesVariant
    from agent.services.proxy.iptables import IptablesBackend

    variant = IptablesVariant[options.iptables_variant.upper()]
    return await IptablesBackend.open(options.pod_networks, variant)


async def _remove_iptables(_: BackendOptions) -> None:
    from agent.services.proxy import iptables

    await iptables.remove()


async def _open_ipvs(options: BackendOptions) -> "Backend":
    from agent.services.proxy.ipvs import IpvsBackend

    return await IpvsBackend.open(options.pod_networks)


async def _remove_ipvs(_: BackendOptions) -> None:
    from agent.services.proxy import ipvs

    await ipvs.remove()


BACKENDS = {
    "ebpf": BackendKind(_open_ebpf, _remove_ebpf),
    "nft": BackendKind(_open_nft, _remove_nft),
    "iptables": BackendKind(_open_iptables, _remove_iptables),
    "ipvs": BackendKind(_open_ipvs, _remove_ipvs),
}

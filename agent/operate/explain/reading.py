"""Reads the facts in force from the pins and the kernel. Changes nothing; functions block.

It needs no agent: programs, hooks and maps outlive it.
"""

import asyncio
import contextlib
import os
import pathlib
import socket
import struct
from collections.abc import Iterable, Iterator

from agent.default_deny import installed
from agent.linux import nft
from agent.linux.cgroups import cgroup2_mount
from agent.linux.node_routes import NodeRoutes
from agent.operate.explain.facts import (
    DefaultDenyFacts,
    EgressFacts,
    Facts,
    GateFacts,
    RelayFacts,
)
from agent.operate.pinned.gate_attachments import GateAttachments
from bpf import abi, errors, hooks, host_egress, loader, map_specs, pins, program_specs, syscalls
from bpf.abi import IPAddress
from bpf.gate_reader import GateReader
from bpf.host_egress import EgressTables
from bpf.host_probes import HostProbes
from bpf.node_addresses import NodeAddressMap
from bpf.node_config import NodeConfig

_NUMBER = struct.Struct("=I")
_TIME = struct.Struct("=Q")
_FIRST = bytes(4)
_NFT_SECONDS = 5.0


def read(installation: pins.Pins, loaded: loader.Loaded, target: IPAddress) -> Facts:
    """All facts about packets to this address. Raises `BpfError` or `OSError`."""
    route = asyncio.run(_route(target))
    return Facts(
        node=NodeConfig(loaded).facts(),
        gates={gate.ifindex: gate for gate in gates(installation, loaded)},
        owners={
            abi.unpack_address(key): _NUMBER.unpack(value)[0]
            for key, value in loaded.map(map_specs.ADDRESSES).items()
        },
        relay=relay(installation, loaded),
        hooks=_hooks(installation, program_specs.HOOKS),
        default_deny=default_deny(),
        route=route,
        is_veth=_is_veth(route),
        denied_host_probes=frozenset(HostProbes(loaded).counts()),
        egress=egress(installation, loaded, target),
    )


def gates(installation: pins.Pins, loaded: loader.Loaded) -> list[GateFacts]:
    """All gates that have a configuration."""
    reader = GateReader(loaded)
    found = []
    with contextlib.closing(GateAttachments(installation)) as attached:
        for ifindex in reader.interfaces():
            if (config := reader.get(ifindex)) is None:
                continue
            found.append(
                GateFacts(
                    ifindex=ifindex,
                    interface=_interface(ifindex),
                    mode=config.mode,
                    addresses=frozenset({*config.addresses, *config.claimed}),
                    rules=config.rules,
                    has_any_address=config.any_address,
                    has_fallback=not config.without_fallback,
                    identified_kubelet=config.identified_kubelet,
                    grace_until_ns=reader.grace_until_ns(ifindex) or 0,
                    is_attached=bool(attached.of(ifindex)),
                    confirmed=config.addresses,
                )
            )
    return found


def relay(installation: pins.Pins, loaded: loader.Loaded) -> RelayFacts:
    pods, interfaces = {}, {}
    for key, value in loaded.map(map_specs.RELAY_PODS).items():
        packed = abi.CRelayPod.from_buffer_copy(value)
        address = abi.unpack_address(key)
        pods[address] = abi.unpack_address(bytes(packed.pod))
        interfaces[address] = packed.ifindex
    targets = {}
    for key, value in loaded.map(map_specs.RELAY_TARGETS).items():
        target = abi.CRelayTargetKey.from_buffer_copy(key)
        pod = abi.unpack_address(bytes(target.pod))
        targets[pod, target.port] = abi.unpack_address(value)
    beat = loaded.map(map_specs.RELAY_BEAT).get(_FIRST)
    assert beat is not None  # an array has all of its keys
    (beat_ns,) = _TIME.unpack(beat)
    return RelayFacts(targets, pods, interfaces, beat_ns, _is_relay_hooked(installation))


def egress(installation: pins.Pins, loaded: loader.Loaded, target: IPAddress) -> EgressFacts | None:
    """None without HostEgressPolicies."""
    if not host_egress.is_installed(installation):
        return None
    with EgressTables(installation) as tables:
        return EgressFacts(
            table=tables.table(),
            names=tables.names(),
            hooks=_hooks(installation, program_specs.EGRESS_HOOKS),
            is_nodes=NodeAddressMap(loaded).has(target),
        )


def _hooks(installation: pins.Pins, specs: Iterable[program_specs.HookSpec]) -> frozenset[str]:
    """Names of the hooks whose pinned link is attached to the root cgroup."""
    mount = cgroup2_mount()
    if mount is None:
        return frozenset()
    found = set()
    with _directory(mount) as cgroup_fd:
        for hook in specs:
            path = installation.links / hook.name
            with contextlib.suppress(errors.BpfError), pins.opened(path) as link_fd:
                if hooks.is_linked(link_fd, cgroup_fd, hook):
                    found.add(hook.name)
    return frozenset(found)


def _is_relay_hooked(installation: pins.Pins) -> bool:
    """Whether the relay's connect hook, whose link has no pin, is attached to the root cgroup."""
    mount = cgroup2_mount()
    hook = next(hook for hook in program_specs.RELAY_HOOKS if hook.name == "relay_connect4")
    ours = set()
    for path in installation.programs.glob(f"*/{hook.name}"):
        with contextlib.suppress(errors.BpfError), pins.opened(path) as program_fd:
            ours.add(syscalls.program_id(program_fd))
    if mount is None or not ours:
        return False
    with _directory(mount) as cgroup_fd, contextlib.suppress(errors.BpfError):
        attached, _ = syscalls.query_cgroup_programs(cgroup_fd, hook.attach_type)
        return not ours.isdisjoint(attached)
    return False


@contextlib.contextmanager
def _directory(path: pathlib.Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def default_deny() -> DefaultDenyFacts | None:
    """None without a table, or without an nft command to read it."""
    try:
        return asyncio.run(_read_default_deny())
    except (nft.NftError, TimeoutError):
        return None


async def _read_default_deny() -> DefaultDenyFacts | None:
    async with asyncio.timeout(_NFT_SECONDS):
        sets = await installed.interface_sets()
        if sets is None:
            return None
        found = await installed.admission()
    return DefaultDenyFacts(
        classified=frozenset(sets[0] | sets[1]),
        is_alive=found.is_alive,
        tracks=found.covers_datagrams,
        kubelet=_in_hierarchy(found.kubelet),
        admits_priority=found.has_priority,
        is_open=found.is_open,
    )


def _in_hierarchy(path: str) -> str:
    """A path below /sys/fs/cgroup, as one from the root of cgroup v2, wherever that is mounted."""
    mount = cgroup2_mount()
    if not path or mount is None:
        return ""
    return "/" + os.path.relpath(f"/sys/fs/cgroup{path}", mount).removeprefix(".")


async def _route(target: IPAddress) -> int:
    """The interface by which the node sends to the address, of a bridge the port; 0 for none."""
    routes = NodeRoutes()
    ifindex, port = 0, None
    with contextlib.suppress(OSError):
        ifindex = (await routes.route_to(target)).ifindex
    # EOPNOTSUPP: the interface is no bridge.
    with contextlib.suppress(OSError):
        port = await routes.bridge_port_of(target, ifindex) if ifindex else None
    return port or ifindex


def _is_veth(ifindex: int) -> bool:
    if not ifindex:
        return False
    # As in `flows`.
    import pyroute2

    with pyroute2.IPRoute() as netlink, contextlib.suppress(pyroute2.NetlinkError):
        (link, *_) = netlink.get_links(ifindex)
        information = link.get_attr("IFLA_LINKINFO")
        return information is not None and information.get_attr("IFLA_INFO_KIND") == "veth"
    return False


def _interface(ifindex: int) -> str:
    with contextlib.suppress(OSError):
        return socket.if_indextoname(ifindex)
    return f"interface {ifindex} (deleted)"

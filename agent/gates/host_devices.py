"""Host devices on which the host's packets would bypass a gate, or lose their source."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Container, Iterable

import structlog

from agent.gates.worker import GateWorker
from agent.linux import udp_listeners
from agent.linux.rtnetlink import Link
from agent.linux.tunnels import TunnelPorts, find_tunnels
from agent.logs import Event
from agent.pods.store import PodStore
from agent.relay import interfaces as relay_interfaces
from bpf import program_specs
from bpf.errors import AttachError

log = structlog.get_logger(__name__)

_STACKED_KINDS = frozenset({"macvlan", "macvtap", "ipvlan", "ipvtap"})

# Pods of a source that does not answer are not waited for.
_SYNC_SECONDS = 5.0

# What the host sends by one of these, it may receive again by another interface. What it sends by
# a switch's internal port, ovs-vswitchd may send again, without the socket. A VLAN's frames are
# readable on its own interface only, and may leave by an uplink as well.
# Copies that a bridge floods have neither socket nor interface, and may come in again by a port.
_REENTRY_KINDS = (
    *(_STACKED_KINDS | {"ifb", "openvswitch", "vlan", "bridge"}),
    # Their other end may send a packet back, as that of a device without Ethernet.
    *("vxlan", "geneve", "gretap", "ip6gretap", "erspan", "ip6erspan"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePrograms:
    """Interface numbers by the program that they need; see bpf/src/host_devices.c."""

    bridges: frozenset[int] = frozenset()
    devices: frozenset[int] = frozenset()
    uplinks: frozenset[int] = frozenset()
    bare_devices: frozenset[int] = frozenset()
    """Without Ethernet headers."""
    hand_made: frozenset[int] = frozenset()
    """The loopback, and interfaces of pods without a gate, which may forward."""
    tuns: frozenset[int] = frozenset()


def programs_for(
    links: Iterable[Link],
    *,
    gated: Container[int],
    enforced: Container[int],
    ungated: Container[int] = frozenset(),
    uplinks: Container[int] = frozenset(),
    tuns: Container[int] = frozenset(),
) -> DevicePrograms:
    """The programs that the host's interfaces need.

    gated: interfaces with a gate; enforced: with one that drops; ungated: interfaces of pods
    without one, which may forward; uplinks: interfaces of default routes; tuns: those whose packets
    count as the host's.
    """
    links = list(links)
    of_enforced = {link.master for link in links if link.index in enforced}
    found = {program.name: set[int]() for program in dataclasses.fields(DevicePrograms)}
    for link in links:
        if link.index in gated:
            continue
        if link.index in tuns:
            found["tuns"].add(link.index)
        if link.is_loopback or link.index in ungated:
            program = "hand_made"
        elif link.kind == "bridge" and link.index in of_enforced:
            program = "bridges"
        elif not link.is_ethernet:
            program = "bare_devices"
        elif _is_uplink(link, uplinks):
            program = "uplinks"
        elif _can_reenter(link):
            program = "devices"
        else:
            continue
        found[program].add(link.index)
    return DevicePrograms(**{name: frozenset(indexes) for name, indexes in found.items()})


class HostDevices:
    """Keeps the programs on host devices up to date with the host's interfaces."""

    def __init__(self, gate_worker: GateWorker, store: PodStore) -> None:
        self._gate_worker = gate_worker
        self._store = store
        self._ensured: dict[str, tuple[frozenset[int], bool]] = {}
        self._tunnels: TunnelPorts | None = None
        self._has_switch: bool | None = None
        self._has_enforced: bool | None = None
        self._may_have_unknown = True
        """Whether programs of other versions may be attached that this one does not have."""
        self._problem = ""

    async def run(self) -> None:
        """Load what no device needs yet, once the first gates are attached: a device that appears
        later waits for no verifier. Until cancelled. Raises `PinError`, `CompileError` or
        `BpfError`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SYNC_SECONDS):
                await self._store.synced.wait()
        for program in program_specs.DEFERRABLE:  # one after the other leaves processors to gates
            await self._gate_worker.load_deferred([program])
        await asyncio.Event().wait()

    async def ensure(
        self,
        links: list[Link],
        uplinks: Container[int] = frozenset(),
        tuns: Container[int] = frozenset(),
    ) -> bool:
        """links: all of the host's; uplinks, tuns: as of `programs_for`. Safe to repeat. While
        podgate is off no program is needed.

        Whether all is in place, as it is to stay; if not, call it again after a while.
        """
        self._update_switch(links)
        is_off = not self._gate_worker.is_attached
        are_all = is_off or self._store.is_synced
        # A pod that waits for its gate may have one of a program that this version does not have.
        are_all_gated = is_off or (are_all and not any(s.is_pending for s in self._store.states()))
        needed = DevicePrograms()
        enforced = set() if is_off else self._store.enforced_interfaces()
        if enforced or are_all:  # otherwise the previous agent knew better
            self._update_enforced(has_any=bool(enforced))
        if not is_off:
            needed = programs_for(
                links,
                gated=self._store.gated_interfaces(),
                enforced=enforced,
                ungated=self._store.ungated_interfaces(),
                uplinks=uplinks,
                tuns=tuns,
            )
        try:
            has_changed = await self._ensure_programs(needed, are_all=are_all)
            tunnels = TunnelPorts(frozenset(), has_any=False)
            if not is_off:
                has_ppp = any(link.kind == "ppp" for link in links)
                listeners = await asyncio.to_thread(udp_listeners.read, has_ppp=has_ppp)
                tunnels = find_tunnels(links, listeners)
            if tunnels != self._tunnels:
                ensure_tunnels = self._gate_worker.host_devices.ensure_tunnels
                await self._gate_worker.run(ensure_tunnels, are_guarded=tunnels.has_any)
                self._gate_worker.config.set_tunnel_ports(tunnels.udp_ports)
                self._tunnels = tunnels
                log.info(
                    Event.TUNNEL_PORTS_PROTECTED,
                    udp_ports=sorted(tunnels.udp_ports),
                    any=tunnels.has_any,
                )
            if are_all_gated and self._may_have_unknown:
                await self._detach_unknown()
            settle = self._gate_worker.host_devices.settle
            is_settled = await self._gate_worker.run(settle, is_calm=not has_changed)
        except (AttachError, OSError, ValueError) as error:
            if str(error) != self._problem:
                log.error(Event.HOST_DEVICES_NOT_PROTECTED, error=str(error))
            self._problem = str(error)
            # Too many ports (ValueError) stay too many until an interface changes.
            return isinstance(error, ValueError)
        self._problem = ""
        return is_settled

    async def _ensure_programs(self, needed: DevicePrograms, *, are_all: bool) -> bool:
        """Whether anything was to be changed."""
        programs = self._gate_worker.host_devices
        has_changed = False
        await self._gate_worker.load_deferred(
            [
                program
                for program, interfaces in (
                    (program_specs.BRIDGE_GATE, needed.bridges),
                    (program_specs.DEVICE_GATE, needed.devices),
                    (program_specs.UPLINK_GATE, needed.uplinks),
                    (program_specs.BARE_DEVICE_GATE, needed.bare_devices),
                )
                if interfaces
            ]
        )
        for name, ensure, interfaces in (
            ("hand_made", programs.ensure_hand_made, needed.hand_made),
            # Before the others: a bridge changes to this program when a pod is enforced.
            ("bridges", programs.ensure_bridges, needed.bridges),
            ("devices", programs.ensure_devices, needed.devices),
            ("uplinks", programs.ensure_uplinks, needed.uplinks),
            ("bare_devices", programs.ensure_bare_devices, needed.bare_devices),
            ("tuns", programs.ensure_spoofed, needed.tuns),
        ):
            if self._ensured.get(name) != (interfaces, are_all):
                await self._gate_worker.run(ensure, set(interfaces), are_all=are_all)
                self._ensured[name] = interfaces, are_all
                has_changed = True
        return has_changed

    async def _detach_unknown(self) -> None:
        """Once, after all programs of this version: only then nothing opens."""
        detached = await self._gate_worker.run(self._gate_worker.host_devices.detach_unknown)
        self._may_have_unknown = False
        if detached:
            log.info(Event.UNKNOWN_PROGRAMS_DETACHED, programs=detached)

    @property
    def has_programs(self) -> bool:
        """Whether a program is attached to any device, or was not checked yet."""
        if self._tunnels is None:
            return True
        return self._tunnels.has_any or any(found for found, _ in self._ensured.values())

    def _update_switch(self, links: list[Link]) -> None:
        has_switch = any(link.kind == "openvswitch" for link in links)
        if has_switch != self._has_switch:
            self._gate_worker.config.set_ovs(is_there=has_switch)
            if has_switch:
                log.warning(Event.OVS_DATAPATH_FOUND)
            self._has_switch = has_switch

    def _update_enforced(self, *, has_any: bool) -> None:
        if has_any != self._has_enforced:
            self._gate_worker.config.set_enforced(has_any=has_any)
            self._has_enforced = has_any


def _can_reenter(link: Link) -> bool:
    """A veth whose peer has no namespace number has both ends on the host. Behind a tap, a VPN's
    other end may send a packet back; ports of bridges are those of virtual machines."""
    if link.kind == "veth":
        return link.peer is not None and link.peer_nsid is None
    if link.kind == "tun":
        return link.master is None
    return link.kind in _REENTRY_KINDS


def _is_uplink(link: Link, uplinks: Container[int]) -> bool:
    """By these, packets leave the node. Those of bonds and teams are physical.

    A node that is a container has a veth, or an interface stacked on another namespace's. Relays'
    interfaces have gates.
    """
    if relay_interfaces.is_relay_interface(link.name):
        return False
    is_stacked_elsewhere = link.kind in _STACKED_KINDS and link.peer_nsid is not None
    return (
        link.kind is None
        or is_stacked_elsewhere
        or (link.kind == "veth" and link.index in uplinks and link.peer_nsid is not None)
    )

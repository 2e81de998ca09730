"""Host devices on which the host's packets would bypass a gate, or lose their source."""

from collections.abc import Container

import structlog

from agent.gates.worker import GateWorker
from agent.linux.rtnetlink import Link
from agent.linux.tunnels import TunnelPorts, find_tunnels
from agent.logs import Event
from agent.pods.store import PodStore
from bpf.errors import AttachError

log = structlog.get_logger(__name__)


class HostDevices:
    """Keeps the programs on bridges and tunnels up to date with the host's interfaces."""

    def __init__(self, gate_worker: GateWorker, store: PodStore) -> None:
        self._gate_worker = gate_worker
        self._store = store
        self._bridges: tuple[set[int], bool] | None = None
        self._tunnels: TunnelPorts | None = None
        self._has_switch: bool | None = None

    async def ensure(self, links: list[Link]) -> None:
        """links: all of the host's. Safe to repeat."""
        self._update_switch(links)
        are_all = self._store.is_synced
        bridges = find_bridges(links, self._store.gated_interfaces())
        tunnels = find_tunnels(links)
        run, programs = self._gate_worker.run, self._gate_worker.host_devices
        try:
            if (bridges, are_all) != self._bridges:
                await run(programs.ensure_bridges, bridges, are_all=are_all)
                self._bridges = (bridges, are_all)
            if tunnels != self._tunnels:
                await run(programs.ensure_tunnels, are_guarded=tunnels.has_any)
                self._gate_worker.config.set_tunnel_ports(tunnels.udp_ports)
                self._tunnels = tunnels
                log.info(
                    Event.TUNNEL_PORTS_PROTECTED,
                    udp_ports=sorted(tunnels.udp_ports),
                    any=tunnels.has_any,
                )
        except (AttachError, ValueError) as error:
            # The next change of any interface starts another attempt.
            log.error(Event.HOST_DEVICES_NOT_PROTECTED, error=str(error))

    def _update_switch(self, links: list[Link]) -> None:
        has_switch = any(link.kind == "openvswitch" for link in links)
        if has_switch != self._has_switch:
            self._gate_worker.config.set_ovs(is_there=has_switch)
            if has_switch:
                log.warning(Event.OVS_DATAPATH_FOUND)
            self._has_switch = has_switch


def find_bridges(links: list[Link], gated: Container[int]) -> set[int]:
    """Bridges that a gated interface belongs to."""
    masters = {link.master for link in links if link.index in gated}
    return {link.index for link in links if link.index in masters and link.kind == "bridge"}

"""Two backends in one: socket hooks for this node's processes, and nftables for the rest.

Connections from outside to node ports, external and load balancer IPs pass no socket of this node,
and socket hooks can neither translate SCTP nor check source ranges. nftables has only these
frontends: without any, there is no table, unless the kernel tracks connections.

Another proxy before this one, such as kube-proxy, translated packets. The kernel remembers such a
connection until two minutes after its end, and drops every packet of a new one whose replies have
the same addresses and ports: a client's from the same port directly to the same endpoint. Where a
table has a chain for NAT, the new one gets another source port instead.
"""

import asyncio

import structlog

from agent.linux import nft
from agent.linux.nft_monitor import Deleted
from agent.logs import Event
from agent.services.proxy import conntrack, ebpf
from agent.services.proxy.ebpf import EbpfBackend
from agent.services.proxy.frontends import Frontend, FrontendChange
from agent.services.proxy.nftables import NftBackend
from bpf.services.tables import ServiceAddress

log = structlog.get_logger(__name__)


class CombinedBackend:
    """Installs each frontend in one of two backends, or in both."""

    is_polled = False

    def __init__(self, sockets: EbpfBackend, packets: NftBackend | None) -> None:
        """Use `open` instead. packets: None without nftables on this node."""
        self._sockets = sockets
        self._packets = packets

    @classmethod
    async def open(cls, sockets: EbpfBackend, packets: NftBackend) -> "CombinedBackend":
        """Without nftables only this node's processes are served; that is logged."""
        try:
            await nft.query("list", "tables")
        except (nft.NftError, TimeoutError) as error:
            log.warning(Event.OUTSIDE_NOT_PROXIED, error=str(error) or "nft timed out")
            return cls(sockets, None)
        if await asyncio.to_thread(conntrack.is_tracking):
            packets.keep_table()
        return cls(sockets, packets)

    async def apply(self, change: FrontendChange) -> None:
        """Raises `BackendError`."""
        await self._sockets.apply(change)
        if self._packets is not None:
            await self._packets.apply(change.of(_is_for_packets))

    def is_concerned(self, deleted: Deleted) -> bool:
        return self._packets is not None and self._packets.is_concerned(deleted)

    async def repair(self) -> bool:
        """Raises `BackendError`."""
        return self._packets is not None and await self._packets.repair()

    async def close(self) -> None:
        await self._sockets.close()
        if self._packets is not None:
            await self._packets.close()


def _is_for_packets(address: ServiceAddress, frontend: Frontend) -> bool:
    return frontend.is_external or not ebpf.is_translated(address, frontend)

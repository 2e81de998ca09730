"""The eBPF backend: translates at the socket, with the programs of `bpf.services.services`."""

import asyncio
import os
import pathlib
import socket

from agent.linux.nft_monitor import Deleted
from agent.services.proxy.backend import BackendError
from agent.services.proxy.frontends import Frontend, FrontendChange
from bpf import errors, pins
from bpf.services import services
from bpf.services.links import ServiceLinks
from bpf.services.tables import ServiceAddress, ServiceEntry

_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP)


def is_translated(address: ServiceAddress, frontend: Frontend) -> bool:
    """Whether a socket hook can translate connections to the frontend.

    The kernel has no hook in connect() of SCTP. A socket that connects has no source address yet,
    so its source ranges cannot be checked.
    """
    return address.protocol in _PROTOCOLS and not frontend.sources


class EbpfBackend:
    """Translates for every socket below one cgroup, in any network namespace."""

    is_polled = False

    def __init__(
        self, opened: services.ServiceMaps, links: ServiceLinks, cgroup: pathlib.Path
    ) -> None:
        """Use `open` instead."""
        self._services = opened
        self._links = links
        self._cgroup = cgroup
        self._is_attached = False

    @classmethod
    async def open(cls, bpffs: str | os.PathLike[str], cgroup: pathlib.Path) -> "EbpfBackend":
        """Raises `BackendError` if the programs cannot be loaded."""
        installation = pins.Pins(bpffs)
        try:
            programs = await services.load(installation)
            links = ServiceLinks(installation, programs)
            return cls(services.ServiceMaps(programs), links, cgroup)
        except (errors.PinError, errors.CompileError, errors.BpfError) as error:
            raise BackendError(str(error)) from error

    async def apply(self, change: FrontendChange) -> None:
        """Attaches with the first one: a previous process' programs serve until then."""
        await asyncio.to_thread(self._change, change)

    def is_concerned(self, deleted: Deleted) -> bool:
        return False

    async def repair(self) -> bool:
        """Its links are pinned, and no firewall's reload knows them."""
        return False

    async def close(self) -> None:
        self._services.close()

    def _change(self, change: FrontendChange) -> None:
        own = change.of(is_translated)
        changed = {address: _service(frontend) for address, frontend in own.changed.items()}
        try:
            self._services.change(changed, own.removed)
            if not self._is_attached:
                self._links.attach(self._cgroup)
                self._is_attached = True
        except (services.ServiceTableFullError, OSError) as error:
            raise BackendError(str(error)) from error


def _service(frontend: Frontend) -> ServiceEntry:
    return ServiceEntry(frontend.port_id, frontend.endpoints, frontend.affinity_seconds)

"""Services at the socket, by the programs of `bpf.services.services`."""

import asyncio
import os
import pathlib

from agent.proxy.backends import BackendError
from agent.proxy.frontends import Change, Frontend
from bpf import errors, pins
from bpf.services import services
from bpf.services.links import ServiceLinks
from bpf.services.tables import ServiceCounter, ServiceEntry


class EbpfBackend:
    """Translates for every socket below one cgroup, whatever its network namespace."""

    def __init__(
        self, opened: services.ServiceMaps, links: ServiceLinks, cgroup: pathlib.Path
    ) -> None:
        """Use `open`."""
        self._services = opened
        self._links = links
        self._cgroup = cgroup
        self._is_attached = False

    @classmethod
    async def open(cls, bpffs: str | os.PathLike[str], cgroup: pathlib.Path) -> "EbpfBackend":
        """Raises `BackendError` where the programs cannot be had."""
        installation = pins.Pins(bpffs)
        try:
            programs = await services.load(installation)
            links = ServiceLinks(installation, programs)
            return cls(services.ServiceMaps(programs), links, cgroup)
        except (errors.PinError, errors.CompileError, errors.BpfError) as error:
            raise BackendError(str(error)) from error

    async def change(self, change: Change) -> None:
        """Attaches with the first one: an earlier process' programs serve until then."""
        await asyncio.to_thread(self._change, change)

    async def close(self) -> None:
        self._services.close()

    def counts(self) -> dict[ServiceCounter, int]:
        return self._services.counts()

    def _change(self, change: Change) -> None:
        changed, gone = {}, change.gone
        for place, frontend in change.changed.items():
            if frontend.sources:
                # Who asks is not known at the socket: the balancer itself is to judge.
                gone = gone | {place}
            else:
                changed[place] = _service(frontend)
        try:
            self._services.change(changed, gone)
            if not self._is_attached:
                self._links.attach(self._cgroup)
                self._is_attached = True
        except (services.ServiceTableFullError, OSError) as error:
            raise BackendError(str(error)) from error


def _service(frontend: Frontend) -> ServiceEntry:
    return ServiceEntry(frontend.port_id, frontend.endpoints, frontend.affinity_seconds)

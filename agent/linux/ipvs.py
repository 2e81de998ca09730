"""The kernel's IPVS table (ip_vs), by pyroute2: virtual services and their destinations."""

import contextlib
import dataclasses
import errno
import ipaddress
import pathlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

from pyroute2.ipvs import IPVS, IPVSDest, IPVSService
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import AsyncGenericNetlinkSocket, GenericNetlinkSocket
from pyroute2.netlink.generic import ipvs as generic

from agent.errors import PodgateError
from bpf.services.tables import ServiceAddress

_SETTINGS = pathlib.Path("/proc/sys/net/ipv4/vs")

# include/uapi/linux/ip_vs.h. A flag for the scheduler, which round robin ignores, marks services of
# podgate: the table has nothing else that distinguishes them from other programs' services.
_PERSISTENT, _OWN = 0x0001, 0x0020
_ALL_FLAGS = 0xFFFFFFFF
_MASQUERADE = 0  # the forwarding method that translates addresses


class IpvsError(PodgateError):
    """The kernel has no IPVS, or rejected a change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """An endpoint of a virtual service."""

    service: ServiceAddress
    endpoint: ServiceAddress


@dataclasses.dataclass(frozen=True, slots=True)
class DestinationState:
    """weight: 0 gets no new connections. connections: those that the kernel has not forgotten."""

    weight: int
    connections: int


class _QuietSocket(AsyncGenericNetlinkSocket):  # type: ignore[misc]
    module_err_level = "debug"  # a missing module is an exception, and not also a log line


class _FamilySocket(GenericNetlinkSocket):  # type: ignore[misc]
    async_class = _QuietSocket


class IpvsTable(IPVS):  # type: ignore[misc]
    """podgate's services in the table of this network namespace. All calls block and raise
    `IpvsError`."""

    def services(self) -> dict[ServiceAddress, int]:
        """With the seconds of their affinity, 0 without."""
        found = {}
        with _errors():
            for message in self.service("dump"):
                record = message.get_attr("IPVS_CMD_ATTR_SERVICE")
                flags = record.get_attr("IPVS_SVC_ATTR_FLAGS")["flags"]
                if flags & _OWN:
                    is_persistent = flags & _PERSISTENT
                    seconds = record.get_attr("IPVS_SVC_ATTR_TIMEOUT") if is_persistent else 0
                    found[_address(record, "SVC", record.get_attr("IPVS_SVC_ATTR_PROTOCOL"))] = (
                        seconds
                    )
        return found

    def destinations(self, service: ServiceAddress) -> dict[Destination, DestinationState]:
        found = {}
        with _errors():
            for message in self.dest("dump", service=_service(service)):
                record = message.get_attr("IPVS_CMD_ATTR_DEST")
                endpoint = _address(record, "DEST", service.protocol)
                found[Destination(service, endpoint)] = DestinationState(
                    record.get_attr("IPVS_DEST_ATTR_WEIGHT"),
                    record.get_attr("IPVS_DEST_ATTR_ACTIVE_CONNS")
                    + record.get_attr("IPVS_DEST_ATTR_INACT_CONNS"),
                )
        return found

    def put_service(self, address: ServiceAddress, affinity_seconds: int, *, is_new: bool) -> None:
        with _errors():
            self.service("add" if is_new else "set", _service(address, affinity_seconds))

    def put_destination(self, one: Destination, weight: int, *, is_new: bool) -> None:
        with _errors():
            self.dest("add" if is_new else "set", _service(one.service), _destination(one, weight))

    def remove_service(self, address: ServiceAddress) -> None:
        """With its destinations. One that another program removed is no error."""
        with _errors(errno.ESRCH):
            self.service("del", _service(address))

    def remove_destination(self, one: Destination) -> None:
        """One that another program removed is no error."""
        with _errors(errno.ESRCH, errno.ENOENT):
            self.dest("del", _service(one.service), _destination(one, 0))


def opened() -> IpvsTable:
    """Loads the kernel's module if it may. Raises `IpvsError` if there is no IPVS."""
    try:
        # First by a socket that can be closed: IPVS' own leaves its event loop open if it fails.
        with contextlib.closing(_FamilySocket()) as netlink:
            netlink.discovery(generic.GENL_NAME)
        return IpvsTable()
    except NetlinkError as error:
        if error.code == errno.ENOENT:
            raise IpvsError("this kernel has no IPVS, or its module ip_vs is not loaded") from error
        raise IpvsError(f"IPVS cannot be read: {error}") from error


def is_loaded() -> bool:
    """Whether there is a table, without loading the module."""
    return _SETTINGS.exists()


def set_up() -> None:
    """Settings of this network namespace without which translation by IPVS fails.

    Connections are tracked, so that netfilter may masquerade them; those to removed destinations
    are forgotten instead of dropped; clients with affinity leave a destination of weight 0. The
    same as kube-proxy's. Loads the kernel's module if it may. Raises `IpvsError`.
    """
    opened().close()
    for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template"):
        try:
            (_SETTINGS / name).write_text("1")
        except OSError as error:
            raise IpvsError(f"{_SETTINGS / name} cannot be written ({error.strerror})") from error


def _service(address: ServiceAddress, affinity_seconds: int = 0) -> IPVSService:
    flags = _OWN | (_PERSISTENT if affinity_seconds else 0)
    more = {}
    if address.address.version == 6:
        # The length of the prefix that is one client, in the place of a mask.
        more["netmask"] = socket.inet_ntoa(struct.pack("=I", 128))
    return IPVSService(
        addr=str(address.address),
        port=address.port,
        protocol=address.protocol,
        sched_name="rr",
        timeout=affinity_seconds,
        flags={"flags": flags, "mask": _ALL_FLAGS},
        **more,
    )


def _destination(one: Destination, weight: int) -> IPVSDest:
    return IPVSDest(
        addr=str(one.endpoint.address),
        port=one.endpoint.port,
        fwd_method=_MASQUERADE,
        weight=weight,
    )


def _address(record: Any, kind: str, protocol: int) -> ServiceAddress:
    text = record.get_attr(f"IPVS_{kind}_ATTR_ADDR")
    port = record.get_attr(f"IPVS_{kind}_ATTR_PORT")
    return ServiceAddress(ipaddress.ip_address(text), port, protocol)


@contextlib.contextmanager
def _errors(*ignored: int) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        if error.code not in ignored:
            raise IpvsError(str(error)) from error

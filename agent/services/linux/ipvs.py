"""The kernel's IPVS table (ip_vs): virtual services and their destinations.

By requests of our own: pyroute2 takes 0.6 ms of CPU for one, and a node of a large cluster needs
tens of thousands when its proxy starts.
"""

import dataclasses
import errno
import ipaddress
import pathlib
import socket
import struct
import sys

from agent.errors import PodgateError
from agent.linux.generic_netlink import GenericSocket
from bpf.netlink import NetlinkError, attribute, attributes
from bpf.services.tables import ServiceAddress

_SETTINGS = pathlib.Path("/proc/sys/net/ipv4/vs")

# include/uapi/linux/ip_vs.h
_FAMILY = "IPVS"
_NEW_SERVICE, _SET_SERVICE, _DEL_SERVICE, _GET_SERVICE = 1, 2, 3, 4
_NEW_DEST, _SET_DEST, _DEL_DEST, _GET_DEST = 5, 6, 7, 8
_SERVICE, _DEST = 1, 2
_SVC_AF, _SVC_PROTOCOL, _SVC_ADDR, _SVC_PORT = 1, 2, 3, 4
_SVC_SCHED_NAME, _SVC_FLAGS, _SVC_TIMEOUT, _SVC_NETMASK = 6, 7, 8, 9
_DEST_ADDR, _DEST_PORT, _DEST_FWD_METHOD, _DEST_WEIGHT = 1, 2, 3, 4
_DEST_U_THRESH, _DEST_L_THRESH, _DEST_ACTIVE_CONNS, _DEST_INACT_CONNS = 5, 6, 7, 8
_DEST_ADDR_FAMILY = 11
# A flag for the scheduler, which round robin ignores, marks services of podgate: the table has
# nothing else that distinguishes them from other programs' services.
_PERSISTENT, _OWN = 0x0001, 0x0020
_ALL_FLAGS = 0xFFFFFFFF
_MASQUERADE = 0  # the forwarding method that translates addresses

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
# What of a client's address is one client: a mask, or for IPv6 the length of a prefix.
_WHOLE_ADDRESS = {4: bytes((255,) * 4), 6: (128).to_bytes(4, sys.byteorder)}
_U16, _U32 = struct.Struct("=H"), struct.Struct("=I")
_SCHEDULER_FLAGS = struct.Struct("=II")  # flags, mask


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


class IpvsTable:
    """podgate's services in the table of this network namespace. All calls block and raise
    `IpvsError`."""

    def __init__(self) -> None:
        """Loads the kernel's module if it may. Raises `IpvsError` if there is no IPVS."""
        try:
            self._netlink = GenericSocket(_FAMILY)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise IpvsError(
                    "this kernel has no IPVS, or its module ip_vs is not loaded"
                ) from error
            raise IpvsError(f"IPVS cannot be read: {error.strerror or error}") from error

    def close(self) -> None:
        self._netlink.close()

    def services(self) -> dict[ServiceAddress, int]:
        """With the seconds of their affinity, 0 without."""
        found = {}
        for message in self._dump(_GET_SERVICE):
            record = attributes(message[_SERVICE])
            flags, _ = _SCHEDULER_FLAGS.unpack(record[_SVC_FLAGS])
            # Services by a firewall mark have no address.
            if flags & _OWN and _SVC_ADDR in record:
                (protocol,) = _U16.unpack(record[_SVC_PROTOCOL])
                (family,) = _U16.unpack(record[_SVC_AF])
                (seconds,) = _U32.unpack(record[_SVC_TIMEOUT])
                address = _address(record[_SVC_ADDR], record[_SVC_PORT], family, protocol)
                found[address] = seconds if flags & _PERSISTENT else 0
        return found

    def destinations(self, service: ServiceAddress) -> dict[Destination, DestinationState]:
        """None of a service that another program removed."""
        found = {}
        for message in self._dump(_GET_DEST, _service(service)):
            record = attributes(message[_DEST])
            endpoint = _address(
                record[_DEST_ADDR],
                record[_DEST_PORT],
                _FAMILIES[service.address.version],
                service.protocol,
            )
            weight, active, inactive = (
                _U32.unpack(record[kind])[0]
                for kind in (_DEST_WEIGHT, _DEST_ACTIVE_CONNS, _DEST_INACT_CONNS)
            )
            found[Destination(service, endpoint)] = DestinationState(weight, active + inactive)
        return found

    def put_service(self, address: ServiceAddress, affinity_seconds: int, *, is_new: bool) -> None:
        command = _NEW_SERVICE if is_new else _SET_SERVICE
        self._change(command, _service(address, affinity_seconds))

    def put_destination(self, one: Destination, weight: int, *, is_new: bool) -> None:
        command = _NEW_DEST if is_new else _SET_DEST
        self._change(command, _service(one.service) + _destination(one, weight))

    def remove_service(self, address: ServiceAddress) -> None:
        """With its destinations. One that another program removed is no error."""
        self._change(_DEL_SERVICE, _service(address), ignored=(errno.ESRCH,))

    def remove_destination(self, one: Destination) -> None:
        """One that another program removed is no error."""
        body = _service(one.service) + _destination(one, 0)
        self._change(_DEL_DEST, body, ignored=(errno.ESRCH, errno.ENOENT))

    def _dump(self, command: int, body: bytes = b"") -> list[dict[int, bytes]]:
        try:
            return self._netlink.dump(command, body)
        except OSError as error:
            raise _error(error) from error

    def _change(self, command: int, body: bytes, ignored: tuple[int, ...] = ()) -> None:
        try:
            self._netlink.change(command, body)
        except NetlinkError as error:
            if error.errno not in ignored:
                raise _error(error) from error
        except OSError as error:
            raise _error(error) from error


def is_loaded() -> bool:
    """Whether there is a table, without loading the module."""
    return _SETTINGS.exists()


def set_up() -> None:
    """Settings of this network namespace without which translation by IPVS fails.

    Connections are tracked, so that netfilter may masquerade them; those to removed destinations
    are forgotten instead of dropped; clients with affinity leave a destination of weight 0. The
    same as kube-proxy's. Loads the kernel's module if it may. Raises `IpvsError`.
    """
    IpvsTable().close()
    for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template"):
        try:
            (_SETTINGS / name).write_text("1")
        except OSError as error:
            raise IpvsError(f"{_SETTINGS / name} cannot be written ({error.strerror})") from error


def _service(address: ServiceAddress, affinity_seconds: int = 0) -> bytes:
    version = address.address.version
    flags = _OWN | (_PERSISTENT if affinity_seconds else 0)
    return attribute(
        _SERVICE,
        attribute(_SVC_AF, _U16.pack(_FAMILIES[version]))
        + attribute(_SVC_PROTOCOL, _U16.pack(address.protocol))
        + attribute(_SVC_ADDR, address.address.packed)
        + attribute(_SVC_PORT, address.port.to_bytes(2, "big"))
        + attribute(_SVC_SCHED_NAME, b"rr\0")
        + attribute(_SVC_FLAGS, _SCHEDULER_FLAGS.pack(flags, _ALL_FLAGS))
        + attribute(_SVC_TIMEOUT, _U32.pack(affinity_seconds))
        + attribute(_SVC_NETMASK, _WHOLE_ADDRESS[version]),
    )


def _destination(one: Destination, weight: int) -> bytes:
    no_limit = _U32.pack(0)
    return attribute(
        _DEST,
        attribute(_DEST_ADDR_FAMILY, _U16.pack(_FAMILIES[one.endpoint.address.version]))
        + attribute(_DEST_ADDR, one.endpoint.address.packed)
        + attribute(_DEST_PORT, one.endpoint.port.to_bytes(2, "big"))
        + attribute(_DEST_FWD_METHOD, _U32.pack(_MASQUERADE))
        + attribute(_DEST_WEIGHT, _U32.pack(weight))
        + attribute(_DEST_U_THRESH, no_limit)
        + attribute(_DEST_L_THRESH, no_limit),
    )


def _address(address: bytes, port: bytes, family: int, protocol: int) -> ServiceAddress:
    """address: a union of both families, so as long as IPv6's."""
    packed = address[: 4 if family == socket.AF_INET else 16]
    return ServiceAddress(ipaddress.ip_address(packed), int.from_bytes(port, "big"), protocol)


def _error(error: OSError) -> IpvsError:
    return IpvsError(error.strerror or str(error))

"""The tables that `src/services.c` shares with user space, and their entries."""

import ctypes
import dataclasses
import struct

from bpf import abi, map_specs

MAX_SERVICES = 131072
MAX_ENDPOINTS = 1048576
_MAX_AFFINITIES = 131072
_MAX_UDP_FLOWS = 65536

_HASH, _LRU_HASH, _SOCKET_STORAGE = 1, 9, 24
_NO_PREALLOC = 1


class CServiceAddress(ctypes.Structure):
    """`struct service_address`: port in network order."""

    _fields_ = (
        ("address", abi.CAddress),
        ("port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
    )


class CService(ctypes.Structure):
    """`struct service`."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("set", ctypes.c_uint32),
        ("endpoint_count", ctypes.c_uint32),
        ("affinity_seconds", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class CEndpointKey(ctypes.Structure):
    """`struct endpoint_key`."""

    _fields_ = (("set", ctypes.c_uint32), ("number", ctypes.c_uint32))


class CMemberKey(ctypes.Structure):
    """`struct member_key`."""

    _fields_ = (("set", ctypes.c_uint32), ("place", CServiceAddress))


class CClientKey(ctypes.Structure):
    """`struct client_key`."""

    _fields_ = (("service", ctypes.c_uint64), ("netns", ctypes.c_uint64))


class CAffinity(ctypes.Structure):
    """`struct affinity`: `used_ns` is CLOCK_MONOTONIC."""

    _fields_ = (("place", CServiceAddress), ("pad", ctypes.c_uint32), ("used_ns", ctypes.c_uint64))


class CPeer(ctypes.Structure):
    """`struct peer`."""

    _fields_ = (("service", CServiceAddress), ("endpoint", CServiceAddress))


class CUdpFlowKey(ctypes.Structure):
    """`struct udp_flow_key`."""

    _fields_ = (
        ("socket", ctypes.c_uint64),
        ("place", CServiceAddress),
        ("is_reply", ctypes.c_uint32),
    )


SET = struct.Struct("=I")
ENDPOINT_KEY = struct.Struct("=II")
ONE = struct.pack("=I", 1)

SERVICES = map_specs.MapSpec(
    "services", _HASH, CServiceAddress, CService, MAX_SERVICES, _NO_PREALLOC
)
ENDPOINTS = map_specs.MapSpec(
    "service_endpoints", _HASH, CEndpointKey, CServiceAddress, MAX_ENDPOINTS, _NO_PREALLOC
)
MEMBERS = map_specs.MapSpec(
    "service_members", _HASH, CMemberKey, map_specs.U32, MAX_ENDPOINTS, _NO_PREALLOC
)
AFFINITIES = map_specs.MapSpec(
    "service_affinities", _LRU_HASH, CClientKey, CAffinity, _MAX_AFFINITIES
)
UDP_FLOWS = map_specs.MapSpec(
    "service_udp_flows", _LRU_HASH, CUdpFlowKey, CServiceAddress, _MAX_UDP_FLOWS
)
MAPS = (SERVICES, ENDPOINTS, MEMBERS, AFFINITIES, UDP_FLOWS)
PEERS = map_specs.MapSpec("service_peers", _SOCKET_STORAGE, ctypes.c_int32, CPeer, 0, _NO_PREALLOC)
"""Which only the programs read."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Address and port of a service or an endpoint. protocol: IPPROTO_TCP or IPPROTO_UDP."""

    address: abi.IPAddress
    port: int
    protocol: int

    def pack(self) -> bytes:
        return (
            abi.pack_address(self.address)
            + self.port.to_bytes(2, "big")
            + bytes((self.protocol, 0))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceEntry:
    """The endpoints of one service address. Without endpoints, connections are rejected.

    id: the same for all addresses of one port of a service, and never 0: a client's affinity holds
    for all of them. affinity_seconds: 0 for none.
    """

    id: int
    endpoints: tuple[ServiceAddress, ...]
    affinity_seconds: int = 0

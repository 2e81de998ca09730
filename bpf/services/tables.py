"""The tables that `src/services.c` shares with user space, and their entries."""

import ctypes
import dataclasses
import enum
import struct

from bpf import abi

MAX_SERVICES = 131072
MAX_ENDPOINTS = 1048576
_MAX_AFFINITIES = 131072
_MAX_UDP_FLOWS = 65536

_HASH, _PERCPU_ARRAY, _LRU_HASH, _SOCKET_STORAGE = 1, 6, 9, 24
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


SET = struct.Struct("=I")
ENDPOINT_KEY = struct.Struct("=II")
_PLACE_SIZE = ctypes.sizeof(CServiceAddress)
ONE = struct.pack("=I", 1)

SERVICES = abi.MapSpec(
    "services", _HASH, _PLACE_SIZE, ctypes.sizeof(CService), MAX_SERVICES, _NO_PREALLOC
)
ENDPOINTS = abi.MapSpec(
    "service_endpoints", _HASH, ENDPOINT_KEY.size, _PLACE_SIZE, MAX_ENDPOINTS, _NO_PREALLOC
)
MEMBERS = abi.MapSpec(
    "service_members", _HASH, SET.size + _PLACE_SIZE, 4, MAX_ENDPOINTS, _NO_PREALLOC
)
AFFINITIES = abi.MapSpec("service_affinities", _LRU_HASH, 16, 32, _MAX_AFFINITIES)
UDP_FLOWS = abi.MapSpec("service_udp_flows", _LRU_HASH, 32, _PLACE_SIZE, _MAX_UDP_FLOWS)
COUNTS = abi.MapSpec("service_counts", _PERCPU_ARRAY, 4, 8, 5)
MAPS = (SERVICES, ENDPOINTS, MEMBERS, AFFINITIES, UDP_FLOWS, COUNTS)
PEERS = abi.MapSpec("service_peers", _SOCKET_STORAGE, 4, 2 * _PLACE_SIZE, 0, _NO_PREALLOC)
"""Which only the programs read."""


class ServiceCounter(enum.IntEnum):
    """`enum service_count`."""

    TRANSLATED = 0
    REJECTED = 1
    AFFINITY = 2
    REPLIES = 3
    RACES = 4


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

"""User space's twin of src/abi.h and src/maps.h.

A test compares every struct here with what the compiler made of the C side. Every opened map is
compared with its `MapSpec`, so a pin of another layout is refused instead of misread.
"""

import ctypes
import dataclasses
import ipaddress
from collections.abc import Iterable

# Part of the pin path. Raised when a map's layout or an enumerator's number changes; new maps and
# new reasons do not change it.
SCHEMA = 1

REASON_SLOTS = 32
VERDICT_COUNT = 3
GATE_ADDRESSES = 16
MAX_GATES = 4096
ORIGIN_IFINDEXES = 1 << 23

# `enum bpf_map_type`
_HASH = 1
_ARRAY = 2
_PERCPU_HASH = 5


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Address(ctypes.Structure):
    """`struct address`: 16 bytes, IPv4 as ::ffff:a.b.c.d."""

    _fields_ = (("word", ctypes.c_uint32 * 4),)


class Gate(ctypes.Structure):
    """`struct gate`: mode and pod addresses of one interface."""

    _fields_ = (
        ("mode", ctypes.c_uint32),
        ("address_count", ctypes.c_uint32),
        ("made_qdisc", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("addresses", Address * GATE_ADDRESSES),
    )


class Counters(ctypes.Structure):
    """`struct counters`: packets by verdict and reason, on one CPU."""

    _fields_ = (("packets", ctypes.c_uint64 * (VERDICT_COUNT * REASON_SLOTS)),)


@dataclasses.dataclass(frozen=True, slots=True)
class MapSpec:
    """What a pinned map must look like. Sizes in bytes; `value_size` is that of one CPU."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int

    @property
    def is_per_cpu(self) -> bool:
        return self.type == _PERCPU_HASH


GATES = MapSpec("gates", _HASH, 4, ctypes.sizeof(Gate), MAX_GATES)
COUNTERS = MapSpec("counters", _PERCPU_HASH, 4, ctypes.sizeof(Counters), MAX_GATES)
ORIGIN = MapSpec("origin", _ARRAY, 4, 8, ORIGIN_IFINDEXES // 64)

MAPS = (GATES, COUNTERS, ORIGIN)

GATE_EGRESS = "gate_egress"
PROGRAMS = (GATE_EGRESS,)


def pack_address(address: IPAddress) -> bytes:
    """16 bytes in network order, IPv4 mapped (RFC 4291, 2.5.5.2)."""
    if address.version == 4:
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def unpack_address(packed: bytes) -> IPAddress:
    """The opposite of `pack_address`."""
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address


def pack_gate(mode: int, addresses: Iterable[IPAddress], *, made_qdisc: bool = False) -> bytes:
    """A value of the gates map. Raises `ValueError` when there are too many addresses."""
    packed = [pack_address(address) for address in addresses]
    if len(packed) > GATE_ADDRESSES:
        raise ValueError(
            f"the pod has {len(packed)} addresses and a gate holds {GATE_ADDRESSES}; "
            "remove some from the pod's interfaces"
        )
    gate = Gate(mode=mode, address_count=len(packed), made_qdisc=made_qdisc)
    for slot, address in zip(gate.addresses, packed, strict=False):
        ctypes.memmove(ctypes.addressof(slot), address, len(address))
    return bytes(gate)


def unpack_gate(value: bytes) -> tuple[int, tuple[IPAddress, ...]]:
    """Mode and addresses of a value of the gates map."""
    gate = Gate.from_buffer_copy(value)
    used = list(gate.addresses)[: gate.address_count]
    return gate.mode, tuple(unpack_address(bytes(address)) for address in used)

"""User space's twin of src/abi.h and src/maps.h.

A test compares every struct here with what the compiler made of the C side. Every opened map is
compared with its `MapSpec`, so a pin of another layout is refused instead of misread.
"""

import ctypes
import dataclasses
import ipaddress

# Part of the pin path. Raised when a map's layout or an enumerator's number changes; new maps and
# new reasons do not change it.
SCHEMA = 2

REASON_SLOTS = 32
VERDICT_COUNT = 3
GATE_ADDRESSES = 16
GATE_RULES = 32
REPLY_SLOTS = 1024
MAX_GATES = 4096
MAX_RULE_HITS = 65536
MAX_CALLERS = 16384
MAX_ADDRESSES = 16384
TUNNEL_PORTS = 8
EVENT_RING_BYTES = 65536
ORIGIN_IFINDEXES = 1 << 23
MAX_RELAY_TARGETS = 65536
RELAY_BEAT_LIMIT_NS = 300_000_000

GATE_ANY_ADDRESS = 1
"""In `Gate.flags`."""

# `enum bpf_map_type`
_HASH = 1
_ARRAY = 2
_PERCPU_HASH = 5
_PERCPU_ARRAY = 6
_HASH_OF_MAPS = 13
_RINGBUF = 27

# `BPF_F_NO_PREALLOC`
_NO_PREALLOC = 1


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class Address(ctypes.Structure):
    """`struct address`: 16 bytes, IPv4 as ::ffff:a.b.c.d."""

    _fields_ = (("word", ctypes.c_uint32 * 4),)


class Rule(ctypes.Structure):
    """`struct rule`: one exception of a gate."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("id", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("first_port", ctypes.c_uint16),
        ("last_port", ctypes.c_uint16),
        ("sender", ctypes.c_uint8),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class Gate(ctypes.Structure):
    """`struct gate`: mode, pod addresses and rules of one interface."""

    _fields_ = (
        ("mode", ctypes.c_uint32),
        ("address_count", ctypes.c_uint32),
        ("rule_count", ctypes.c_uint32),
        ("flags", ctypes.c_uint16),
        ("claimed_count", ctypes.c_uint16),
        ("grace_until_ns", ctypes.c_uint64),
        ("addresses", Address * GATE_ADDRESSES),
        ("rules", Rule * GATE_RULES),
    )


class Config(ctypes.Structure):
    """`struct config`: what all gates know; times are CLOCK_MONOTONIC in ns."""

    _fields_ = (
        ("kubelet_cgroup", ctypes.c_uint64),
        ("pods_cgroup", ctypes.c_uint64),
        ("heartbeat_ns", ctypes.c_uint64),
        ("stale_after_ns", ctypes.c_uint64),
        ("dead_after_ns", ctypes.c_uint64),
        ("node_netns", ctypes.c_uint64),
        ("pods_cgroup_level", ctypes.c_uint32),
        ("tunnel_port_count", ctypes.c_uint32),
        ("tunnel_ports", ctypes.c_uint16 * TUNNEL_PORTS),
        ("has_switch", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class Event(ctypes.Structure):
    """`struct event`: one refusal as it happened; ports in host order."""

    _fields_ = (
        ("at_ns", ctypes.c_uint64),
        ("cgroup", ctypes.c_uint64),
        ("source", Address),
        ("destination", Address),
        ("ifindex", ctypes.c_uint32),
        ("process", ctypes.c_uint32),
        ("source_port", ctypes.c_uint16),
        ("destination_port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("verdict", ctypes.c_uint8),
        ("reason", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
        ("name", ctypes.c_char * 16),
    )


class EventBudget(ctypes.Structure):
    """`struct event_budget`: how many events one CPU may still tell, and how many it did not."""

    _fields_ = (
        ("since_ns", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
    )


class Flow(ctypes.Structure):
    """`struct flow`: a conversation that is not TCP; ports in network order."""

    _fields_ = (
        ("pod", Address),
        ("peer", Address),
        ("pod_port", ctypes.c_uint16),
        ("peer_port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
    )


class ReplySlot(ctypes.Structure):
    """`struct reply_slot`: what the pod asked last, of the flows that share the slot."""

    _fields_ = (("flow", Flow), ("sent_ns", ctypes.c_uint64))


class CallerKey(ctypes.Structure):
    """`struct caller_key`: who (cgroup id) started what to whom."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("ifindex", ctypes.c_uint32),
        ("port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
    )


class Caller(ctypes.Structure):
    """`struct caller`: times are CLOCK_MONOTONIC in ns, `count` in packets."""

    _fields_ = (
        ("first_ns", ctypes.c_uint64),
        ("last_ns", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
    )


class Counters(ctypes.Structure):
    """`struct counters`: packets by verdict and reason, on one CPU."""

    _fields_ = (("packets", ctypes.c_uint64 * (VERDICT_COUNT * REASON_SLOTS)),)


class RelayTargetKey(ctypes.Structure):
    """`struct relay_target_key`: a pod's port, in host order; 0 stands for any."""

    _fields_ = (("pod", Address), ("port", ctypes.c_uint32))


class RelayOrigin(ctypes.Structure):
    """`struct relay_origin`: what one of the relay's addresses stands for."""

    _fields_ = (("pod", Address), ("ifindex", ctypes.c_uint32), ("pad", ctypes.c_uint32))


@dataclasses.dataclass(frozen=True, slots=True)
class MapSpec:
    """What a pinned map must look like. Sizes in bytes; `value_size` is that of one CPU."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int = 0

    @property
    def is_per_cpu(self) -> bool:
        return self.type in (_PERCPU_HASH, _PERCPU_ARRAY)


GATES = MapSpec("gates", _HASH, 4, ctypes.sizeof(Gate), MAX_GATES, _NO_PREALLOC)
COUNTERS = MapSpec("counters", _PERCPU_HASH, 4, ctypes.sizeof(Counters), MAX_GATES, _NO_PREALLOC)
RULE_HITS = MapSpec("rule_hits", _PERCPU_HASH, 4, 8, MAX_RULE_HITS, _NO_PREALLOC)
CONFIG = MapSpec("config", _ARRAY, 4, ctypes.sizeof(Config), 1)
CALLERS = MapSpec(
    "callers", _HASH, ctypes.sizeof(CallerKey), ctypes.sizeof(Caller), MAX_CALLERS, _NO_PREALLOC
)
CALLERS_LOST = MapSpec("callers_lost", _PERCPU_ARRAY, 4, 8, 1)
REPLY_TABLE = MapSpec("reply_table", _ARRAY, 4, ctypes.sizeof(ReplySlot), REPLY_SLOTS)
REPLIES = MapSpec("replies", _HASH_OF_MAPS, 4, 4, MAX_GATES)
ADDRESSES = MapSpec("addresses", _HASH, ctypes.sizeof(Address), 4, MAX_ADDRESSES, _NO_PREALLOC)
EVENTS = MapSpec("events", _RINGBUF, 0, 0, EVENT_RING_BYTES)
EVENT_BUDGET = MapSpec("event_budget", _PERCPU_ARRAY, 4, ctypes.sizeof(EventBudget), 1)
ORIGIN = MapSpec("origin", _ARRAY, 4, 8, ORIGIN_IFINDEXES // 64)
RELAY_TARGETS = MapSpec(
    *("relay_targets", _HASH, ctypes.sizeof(RelayTargetKey), ctypes.sizeof(Address)),
    *(MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_ORIGINS = MapSpec(
    *("relay_origins", _HASH, ctypes.sizeof(Address), ctypes.sizeof(RelayOrigin)),
    *(MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_BEAT = MapSpec("relay_beat", _ARRAY, 4, 8, 1)

MAPS = (
    *(GATES, COUNTERS, RULE_HITS, CONFIG, CALLERS, CALLERS_LOST),
    *(REPLY_TABLE, REPLIES, ADDRESSES, EVENTS, EVENT_BUDGET, ORIGIN),
    *(RELAY_TARGETS, RELAY_ORIGINS, RELAY_BEAT),
)

GATE_EGRESS = "gate_egress"
GATE_INGRESS = "gate_ingress"
JUDGE_ON_BRIDGE = "judge_on_bridge"
GUARD_TUNNELS = "guard_tunnels"
HOLD_OPENINGS = "hold_openings"
DROP_FORWARDED = "drop_forwarded"


def spare(program: str) -> str:
    """The name of a program's second copy.

    A program can be in an interface's chain only once, and to change its place without a gap it
    must for a moment be there twice.
    """
    return f"{program}_spare"


_TC_PROGRAMS = (
    *(GATE_EGRESS, GATE_INGRESS),
    *(JUDGE_ON_BRIDGE, GUARD_TUNNELS),
    *(HOLD_OPENINGS, DROP_FORWARDED),
)

# The function of each pinned program. Only gates have spares: nobody else's programs are usual on
# bridges, the loopback and the relay's pair.
PROGRAMS = {
    **{name: name for name in _TC_PROGRAMS},
    **{spare(name): name for name in (GATE_EGRESS, GATE_INGRESS)},
}


NODE_KEY = bytes(4)
"""Of the counters of what is refused before an interface is chosen."""


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """A program for the root cgroup. type: `enum bpf_prog_type`; attach_type: of its enum."""

    name: str
    type: int
    attach_type: int


_SOCK_ADDR, _SOCKOPT = 18, 25

HOOKS = (
    HookSpec("hook_connect4", _SOCK_ADDR, 10),
    HookSpec("hook_connect6", _SOCK_ADDR, 11),
    HookSpec("hook_sendmsg4", _SOCK_ADDR, 14),
    HookSpec("hook_sendmsg6", _SOCK_ADDR, 15),
    HookSpec("hook_setsockopt", _SOCKOPT, 22),
)
"""Without them the gates still hold: a kernel that refuses one has the others."""

RELAY_HOOKS = (
    HookSpec("relay_getpeername4", _SOCK_ADDR, 29),
    HookSpec("relay_getpeername6", _SOCK_ADDR, 30),
    HookSpec("relay_connect4", _SOCK_ADDR, 10),
    HookSpec("relay_connect6", _SOCK_ADDR, 11),
)
"""Attached by the relay's process (`bpf/redirect.py`), all or none, in this order: who is
redirected must not see it.
"""


def pack_address(address: IPAddress) -> bytes:
    """16 bytes in network order, IPv4 mapped (RFC 4291, 2.5.5.2)."""
    if address.version == 4:
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def unpack_address(packed: bytes) -> IPAddress:
    """The opposite of `pack_address`."""
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address

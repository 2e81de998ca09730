"""The tables that `src/host_egress.h` shares with user space, and their entries."""

import ctypes
import dataclasses
import ipaddress
from collections.abc import Iterable, Mapping

from bpf import abi, map_specs
from bpf.rules import MAX_PORT
from bpf.verdicts import Verdict

POLICIES = 64
"""Policies on one node: one bit of a mask each."""
RULES = 128
"""Destinations of all policies together."""
LEVELS = 7
"""Different depths of subjects' cgroups."""
MAX_SUBJECTS = 16384
MAX_SOURCES = 4096

_HASH, _ARRAY, _LRU_HASH, _SK_STORAGE = 1, 2, 9, 24
_NO_PREALLOC = 1
_IPV4_BITS = 96


class CEgressSubjectKey(ctypes.Structure):
    """`struct egress_subject_key`."""

    _fields_ = (("cgroup", ctypes.c_uint64), ("version", ctypes.c_uint64))


class CEgressSubject(ctypes.Structure):
    """`struct egress_subject`."""

    _fields_ = (("denied", ctypes.c_uint64), ("excepted", ctypes.c_uint64))


class CEgressRule(ctypes.Structure):
    """`struct egress_rule`."""

    _fields_ = (
        ("address", abi.CAddress),
        ("mask", abi.CAddress),
        ("policy", ctypes.c_uint32),
        ("first_port", ctypes.c_uint16),
        ("last_port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("is_nodes", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class CEgressRules(ctypes.Structure):
    """`struct egress_rules`."""

    _fields_ = (
        ("enforced", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("rules", CEgressRule * RULES),
    )


class CEgressSourceKey(ctypes.Structure):
    """`struct egress_source_key`."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("policy", ctypes.c_uint32),
        ("protocol", ctypes.c_uint8),
        ("verdict", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class CEgressSocket(ctypes.Structure):
    """`struct egress_socket`."""

    _fields_ = (("counted", ctypes.c_uint32), ("is_accepted", ctypes.c_uint32))


class CEgressPolicy(ctypes.Structure):
    """`struct egress_policy`."""

    _fields_ = (("name", ctypes.c_char * 256),)


STATE = map_specs.MapSpec("egress_state", _ARRAY, map_specs.U32, map_specs.U64, 1)
SUBJECTS = map_specs.MapSpec(
    *("egress_subjects", _HASH, CEgressSubjectKey, CEgressSubject, MAX_SUBJECTS, _NO_PREALLOC)
)
RULE_SETS = map_specs.MapSpec("egress_rules", _ARRAY, map_specs.U32, CEgressRules, 2)
COUNTS = map_specs.MapSpec(
    "egress_counts", _ARRAY, map_specs.U32, map_specs.U64, POLICIES * abi.VERDICT_COUNT
)
SOURCES = map_specs.MapSpec(
    "egress_sources", _LRU_HASH, CEgressSourceKey, abi.CDropSource, MAX_SOURCES
)
SOCKETS = map_specs.MapSpec(
    "egress_sockets", _SK_STORAGE, ctypes.c_int32, CEgressSocket, 0, _NO_PREALLOC
)
NAMES = map_specs.MapSpec("egress_policies", _ARRAY, map_specs.U32, CEgressPolicy, POLICIES)

MAPS = (STATE, SUBJECTS, RULE_SETS, COUNTS, SOURCES, SOCKETS, NAMES)


@dataclasses.dataclass(frozen=True, slots=True)
class EgressRule:
    """A destination that one policy denies.

    policy: its number; network: None for all addresses; is_nodes: only the node's own addresses and
    the loopback of these; protocol: IP protocol number, 0 for all; ports are inclusive.
    """

    policy: int
    network: abi.IPNetwork | None = None
    is_nodes: bool = False
    protocol: int = 0
    first_port: int = 0
    last_port: int = MAX_PORT

    def pack(self) -> CEgressRule:
        address, mask = bytes(16), bytes(16)
        if self.network is not None:
            address = abi.pack_address(self.network.network_address)
            bits = self.network.prefixlen + (_IPV4_BITS if self.network.version == 4 else 0)
            mask = ((1 << 128) - (1 << (128 - bits))).to_bytes(16, "big")
        return CEgressRule(
            address=abi.CAddress.from_buffer_copy(address),
            mask=abi.CAddress.from_buffer_copy(mask),
            policy=self.policy,
            first_port=self.first_port,
            last_port=self.last_port,
            protocol=self.protocol,
            is_nodes=self.is_nodes,
        )

    @classmethod
    def unpack(cls, entry: CEgressRule) -> "EgressRule":
        bits = int.from_bytes(bytes(entry.mask), "big").bit_count()
        network: abi.IPNetwork | None = None
        if bits:
            address = abi.unpack_address(bytes(entry.address))
            length = bits - (_IPV4_BITS if address.version == 4 else 0)
            network = ipaddress.ip_network((address, length))
        return cls(
            policy=entry.policy,
            network=network,
            is_nodes=bool(entry.is_nodes),
            protocol=entry.protocol,
            first_port=entry.first_port,
            last_port=entry.last_port,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EgressSubject:
    """Masks of policies for a cgroup and all below it, the nearest of which decides.

    level: its depth below the root, at least 1.
    """

    level: int
    denied: int = 0
    excepted: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EgressTable:
    """All policies of a node. subjects: by cgroup id; enforced: mask of policies, the others only
    count."""

    subjects: Mapping[int, EgressSubject]
    rules: tuple[EgressRule, ...]
    enforced: int

    @property
    def levels(self) -> list[int]:
        """Of the subjects, ascending."""
        return sorted({subject.level for subject in self.subjects.values()})

    def pack_rules(self) -> bytes:
        packed = CEgressRules(enforced=self.enforced, count=len(self.rules))
        for number, rule in enumerate(self.rules):
            packed.rules[number] = rule.pack()
        return bytes(packed)


@dataclasses.dataclass(frozen=True, slots=True)
class EgressSource:
    """What one cgroup attempted, and one policy denies.

    cgroup: id; times: CLOCK_MONOTONIC in nanoseconds; count: connects, datagrams and packets;
    process_name: of the first, empty if only packets were seen.
    """

    cgroup: int
    policy: str
    protocol: int
    verdict: Verdict
    first_ns: int
    last_ns: int
    count: int
    process_name: str


def pack_state(version: int, levels: Iterable[int]) -> int:
    """`EGRESS_VERSION` and `EGRESS_LEVEL` of src/host_egress.h."""
    return int.from_bytes(bytes([version, *levels]).ljust(8, b"\0"), "little")

"""User space's twin of src/abi.h and src/maps.h.

A test compares every struct here with the compiler's layout of the C side. Every opened map is
compared with its `MapSpec`, so a pin of another layout is an error instead of being misread.
"""

import ctypes
import dataclasses
import ipaddress
from typing import Any

# Part of the pin path. Raised when a map's layout or name, a program's name or an enumerator's
# number changes; new maps and new reasons do not change it.
SCHEMA = 6

REASON_SLOTS = 32
VERDICT_COUNT = 3
COUNTER_SLOTS = 64
GATE_ADDRESSES = 2
MAX_GATE_ADDRESSES = 1024
GATE_RULES = 32
GATE_FIRST_RULES = 4
GATE_MORE_RULES = GATE_RULES - GATE_FIRST_RULES
REPLY_WAYS = 8
QUESTION_SETS = 512
CROWD_SETS = 256
REPLY_SETS = QUESTION_SETS + CROWD_SETS
QUESTION_BUCKETS = 8
PORT_FLOWS = 4
REPLIED = 1
REPLY_KEY_WORDS = 12
MAX_FRAGMENTS = 8192
MAX_NODE_ADDRESSES = 65536
MAX_OLD_RAW_SOCKETS = 65536
MAX_DENIED_HOST_PROBES = 1024
CONNECT_LEVELS = 16
MAX_HOST_CONNECTS = 32768
MAX_CONNECTING_CGROUPS = 1024
MAX_CGROUP_LEVELS = 32
CREATORS_EXACT = 1
CREATORS_SUBTREE = 2
MAX_RAW_SOCKET_CREATORS = 65536
MAX_RAW_SOCKET_SOURCES = 4096
MAX_GATES = 4096
MAX_RULE_HITS = 65536
MAX_DROP_SOURCES = 16384
MAX_SOURCE_CGROUPS = 4096
CGROUP_SOURCES = 1024
MANY_PORTS = 0
MAX_ADDRESSES = 16384
MAX_MORE_ADDRESSES = 65536
TUNNEL_PORTS = 8
EVENT_RING_BYTES = 65536
KUBELET_PATH_BYTES = 256
INJECTABLE_IFINDEXES = 1 << 23
MAX_RELAY_TARGETS = 65536
MAX_RELAY_BYPASSES = 8192
RELAY_BEAT_LIMIT_NS = 300_000_000
MAX_WATCHED_WORDS = 4096
WORD_CHANGE_RING_BYTES = 4096

HOST_SLOT = 0
FALLBACK_SLOT = 1
FIRST_SLOT = 2
SLOT_COUNT = FIRST_SLOT + MAX_GATES

# In `CGate.flags`
GATE_ANY_ADDRESS = 1
GATE_NO_FALLBACK = 2
GATE_HAS_MORE_ADDRESSES = 4
GATE_IDENTIFIED_KUBELET = 8

# `enum bpf_map_type`
_HASH = 1
_ARRAY = 2
_PERCPU_HASH = 5
_PERCPU_ARRAY = 6
_LRU_HASH = 9
_LPM_TRIE = 11
_HASH_OF_MAPS = 13
_SK_STORAGE = 24
_RINGBUF = 27

# `BPF_F_NO_PREALLOC`
_NO_PREALLOC = 1
# `BPF_F_MMAPABLE`, since Linux 5.5
_MMAPABLE = 1024


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class CAddress(ctypes.Structure):
    """`struct address`: 16 bytes, IPv4 as ::ffff:a.b.c.d."""

    _fields_ = (("word", ctypes.c_uint32 * 4),)


class CRule(ctypes.Structure):
    """`struct rule`: one exception of a gate."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("id", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("first_port", ctypes.c_uint16),
        ("last_port", ctypes.c_uint16),
        ("source_kind", ctypes.c_uint8),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint16),
    )


class CGate(ctypes.Structure):
    """`struct gate`: mode, first addresses and first rules of one interface."""

    _fields_ = (
        ("ifindex", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("rule_count", ctypes.c_uint32),
        ("flags", ctypes.c_uint16),
        ("address_count", ctypes.c_uint16),
        ("claimed_count", ctypes.c_uint16),
        ("version", ctypes.c_uint16),
        ("grace_until_ns", ctypes.c_uint64),
        ("addresses", CAddress * GATE_ADDRESSES),
        ("rules", CRule * GATE_FIRST_RULES),
    )


class CGateSlot(ctypes.Structure):
    """`struct gate_slot`: two versions of a gate's configuration, and which is in force."""

    _fields_ = (
        ("current", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("versions", CGate * 2),
    )


class CMoreRulesKey(ctypes.Structure):
    """`struct more_rules_key`: a version of a gate's configuration."""

    _fields_ = (("ifindex", ctypes.c_uint32), ("version", ctypes.c_uint32))


class CMoreRules(ctypes.Structure):
    """`struct more_rules`: the rules that have no place in `CGate`."""

    _fields_ = (("rules", CRule * GATE_MORE_RULES),)


class CGateAddress(ctypes.Structure):
    """`struct gate_address`: an address that has no place in `CGate`."""

    _fields_ = (("address", CAddress), ("ifindex", ctypes.c_uint32))


class CConfig(ctypes.Structure):
    """`struct config`: configuration shared by all gates; times are CLOCK_MONOTONIC in ns."""

    _fields_ = (
        ("kubelet_cgroup", ctypes.c_uint64),
        ("pods_cgroup", ctypes.c_uint64),
        ("heartbeat_ns", ctypes.c_uint64),
        ("stale_after_ns", ctypes.c_uint64),
        ("dead_man_ns", ctypes.c_uint64),
        ("node_netns", ctypes.c_uint64),
        ("pods_cgroup_level", ctypes.c_uint32),
        ("tunnel_port_count", ctypes.c_uint32),
        ("tunnel_ports", ctypes.c_uint16 * TUNNEL_PORTS),
        ("has_ovs", ctypes.c_uint32),
        ("kubelet_unit", ctypes.c_uint32),
        ("has_node_addresses", ctypes.c_uint32),
        ("has_enforced", ctypes.c_uint32),
    )


class CBufferLayout(ctypes.Structure):
    """`struct buffer_layout`: offsets in bytes in the kernel's `struct sk_buff`."""

    _fields_ = (
        ("head", ctypes.c_uint32),
        ("data", ctypes.c_uint32),
        ("csum_start", ctypes.c_uint32),
        ("csum_offset", ctypes.c_uint32),
    )


class CKubeletUnit(ctypes.Structure):
    """`struct kubelet_unit`: the cgroup path that the kernel follows, and offsets in bytes."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("node_offset", ctypes.c_uint32),
        ("id_offset", ctypes.c_uint32),
        ("root_offset", ctypes.c_uint32),
        ("hierarchy_offset", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("path", ctypes.c_char * KUBELET_PATH_BYTES),
    )


class CKubeletRemade(ctypes.Structure):
    """`struct kubelet_remade`: the newest cgroup at the unit's path, by the unit's number."""

    _fields_ = (("cgroup", ctypes.c_uint64), ("unit", ctypes.c_uint64))


class CDropEvent(ctypes.Structure):
    """`struct drop_event`: one dropped packet or rejected system call; ports in host order."""

    _fields_ = (
        ("at_ns", ctypes.c_uint64),
        ("cgroup", ctypes.c_uint64),
        ("source", CAddress),
        ("destination", CAddress),
        ("ifindex", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("source_port", ctypes.c_uint16),
        ("destination_port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("verdict", ctypes.c_uint8),
        ("reason", ctypes.c_uint8),
        ("pad", ctypes.c_uint8),
        ("process_name", ctypes.c_char * 16),
    )


class CEventBudget(ctypes.Structure):
    """`struct event_budget`: one CPU's remaining events in this window, and those suppressed."""

    _fields_ = (
        ("since_ns", ctypes.c_uint64),
        ("remaining", ctypes.c_int64),
        ("suppressed", ctypes.c_uint64),
    )


class CClockReading(ctypes.Structure):
    """`struct clock_reading`: one CPU's last reading of the clock, and the tick in which it was."""

    _fields_ = (
        ("jiffies", ctypes.c_uint64),
        ("now_ns", ctypes.c_uint64),
    )


class CFlow(ctypes.Structure):
    """`struct flow`: a flow of a protocol other than TCP; ports in network order."""

    _fields_ = (
        ("pod", CAddress),
        ("peer", CAddress),
        ("pod_port", ctypes.c_uint16),
        ("peer_port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
    )


class CReplySlot(ctypes.Structure):
    """`struct reply_slot`: fingerprint of a flow and the time of its last packet."""

    _fields_ = (("fingerprint", ctypes.c_uint64), ("sent_ns", ctypes.c_uint64))


class CReplySet(ctypes.Structure):
    """`struct reply_set`: the slots in one element of a reply table."""

    _fields_ = (("slots", CReplySlot * REPLY_WAYS),)


class CReplyKey(ctypes.Structure):
    """`struct reply_key`: random numbers for the fingerprints."""

    _fields_ = (("words", ctypes.c_uint32 * REPLY_KEY_WORDS),)


class CFragment(ctypes.Structure):
    """`struct fragment`: a datagram in fragments; id as in the packet."""

    _fields_ = (
        ("source", CAddress),
        ("destination", CAddress),
        ("socket", ctypes.c_uint64),
        ("id", ctypes.c_uint32),
        ("ingress_ifindex", ctypes.c_uint32),
        ("protocol", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 7),
    )


class CNodeAddress(ctypes.Structure):
    """`struct node_address`: an address of the node, or a range of its own."""

    _fields_ = (("prefix_bits", ctypes.c_uint32), ("address", CAddress))


class CSocketHistory(ctypes.Structure):
    """`struct socket_history`: what a socket of the node has done."""

    _fields_ = (
        ("foreign_source", CAddress),
        ("foreign_sources", ctypes.c_uint32),
        ("is_raw", ctypes.c_uint32),
    )


class CHostProbe(ctypes.Structure):
    """`struct host_probe`: where a probe's or hook's host sends the kubelet."""

    _fields_ = (
        ("address", CAddress),
        ("port", ctypes.c_uint16),
        ("pad", ctypes.c_uint16),
    )


class CHostConnect(ctypes.Structure):
    """`struct host_connect`: a TCP connection that a host process opens, and its cgroup (id)."""

    _fields_ = (("sent_ns", ctypes.c_uint64), ("cgroup", ctypes.c_uint64))


class CCgroupAncestors(ctypes.Structure):
    """`struct cgroup_ancestors`: the cgroups (ids) above that of a connecting process, by level."""

    _fields_ = (("ids", ctypes.c_uint64 * CONNECT_LEVELS),)


class CConnectLayout(ctypes.Structure):
    """`struct connect_layout`: offsets in bytes, of a socket and of its next sequence number."""

    _fields_ = (("socket", ctypes.c_uint32), ("sequence", ctypes.c_uint32))


class CDropSourceKey(ctypes.Structure):
    """`struct drop_source_key`: source cgroup (id), gate, protocol, port and mode of drops."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("ifindex", ctypes.c_uint32),
        ("port", ctypes.c_uint16),
        ("protocol", ctypes.c_uint8),
        ("mode", ctypes.c_uint8),
    )


class CDropSource(ctypes.Structure):
    """`struct drop_source`: times are CLOCK_MONOTONIC in ns, `count` in packets."""

    _fields_ = (
        ("first_ns", ctypes.c_uint64),
        ("last_ns", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("process_name", ctypes.c_char * 16),
    )


class CRecentSource(ctypes.Structure):
    """`struct recent_source`: packets of one CPU's last source that have no entry yet."""

    _fields_ = (
        ("key", CDropSourceKey),
        ("since_ns", ctypes.c_uint64),
        ("last_ns", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
    )


class CRawSocketPolicy(ctypes.Structure):
    """`struct raw_socket_policy`: offsets in bytes."""

    _fields_ = (
        ("denies_pods", ctypes.c_uint32),
        ("node_netns", ctypes.c_uint32),
        ("nsproxy_offset", ctypes.c_uint32),
        ("netns_offset", ctypes.c_uint32),
        ("inode_offset", ctypes.c_uint32),
    )


class CRawSocketSourceKey(ctypes.Structure):
    """`struct raw_socket_source_key`: source cgroup (id), family and verdict."""

    _fields_ = (
        ("cgroup", ctypes.c_uint64),
        ("family", ctypes.c_uint16),
        ("verdict", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 5),
    )


class CCounters(ctypes.Structure):
    """`struct counters`: packets by reason, passed or dropped, then those of would-drop."""

    _fields_ = (("packets", ctypes.c_uint64 * COUNTER_SLOTS),)


class CFrequentCounts(ctypes.Structure):
    """`struct frequent_counts`: one CPU's packets of two reasons."""

    _fields_ = (("established", ctypes.c_uint64), ("node", ctypes.c_uint64))


class CRelayTargetKey(ctypes.Structure):
    """`struct relay_target_key`: a pod's port, in host order; 0 for any port."""

    _fields_ = (("pod", CAddress), ("port", ctypes.c_uint32))


class CRelayPod(ctypes.Structure):
    """`struct relay_pod`: the pod that one of the relay's addresses represents."""

    _fields_ = (
        ("pod", CAddress),
        ("ifindex", ctypes.c_uint32),
        ("admits_translated", ctypes.c_uint32),
    )


class CWatchedWord(ctypes.Structure):
    """`struct watched_word`: eight bytes of the kernel's memory."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("found", ctypes.c_uint64),
    )


class CWatchedWords(ctypes.Structure):
    """`struct watched_words`: how many words are compared, how often they were, and the words."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("comparisons", ctypes.c_uint64),
        ("words", CWatchedWord * MAX_WATCHED_WORDS),
    )


CType = Any
"""A key's or a value's type, by which it is described to the kernel (`bpf/map_types.py`)."""

U32, U64 = ctypes.c_uint32, ctypes.c_uint64


@dataclasses.dataclass(frozen=True, slots=True)
class MapSpec:
    """The shape of a map, by which it is created and compared.

    key, value: their types, None for a ring buffer; `value` is that of one CPU. template: of a map
    of maps, an earlier map as those that it will hold.
    """

    name: str
    type: int
    key: CType | None
    value: CType | None
    max_entries: int
    flags: int = 0
    template: str = ""

    @property
    def key_size(self) -> int:
        """In bytes; 0 without keys."""
        return ctypes.sizeof(self.key) if self.key else 0

    @property
    def value_size(self) -> int:
        """In bytes, of one CPU; 0 without values."""
        return ctypes.sizeof(self.value) if self.value else 0

    @property
    def is_per_cpu(self) -> bool:
        return self.type in (_PERCPU_HASH, _PERCPU_ARRAY)

    @property
    def is_listed(self) -> bool:
        """Whether the kernel lists its entries; not what sockets have of it in their own memory."""
        return self.type not in (_SK_STORAGE, _RINGBUF)

    @property
    def is_mmapable(self) -> bool:
        """Of an array that is read whole: mmap(2) takes no time, a batch 0.7 us for each value."""
        return bool(self.flags & _MMAPABLE)


GATE_SLOTS = MapSpec("gate_slots", _HASH, U32, U32, MAX_GATES, _NO_PREALLOC)
GATES = MapSpec("gates", _ARRAY, U32, CGateSlot, SLOT_COUNT)
COUNTERS = MapSpec("counters", _ARRAY, U32, CCounters, SLOT_COUNT)
FREQUENT_COUNTS = MapSpec("frequent_counts", _PERCPU_ARRAY, U32, CFrequentCounts, SLOT_COUNT)
MORE_RULES = MapSpec(
    *("more_rules", _HASH, CMoreRulesKey, CMoreRules),
    *(2 * MAX_GATES, _NO_PREALLOC),
)
GATE_ADDRESSES_MAP = MapSpec(
    *("gate_addresses", _HASH, CGateAddress, U32, MAX_MORE_ADDRESSES, _NO_PREALLOC)
)
RULE_HITS = MapSpec("rule_hits", _PERCPU_HASH, U32, U64, MAX_RULE_HITS, _NO_PREALLOC)
CONFIG = MapSpec("config", _ARRAY, U32, CConfig, 1)
BUFFER_LAYOUT = MapSpec("buffer_layout", _ARRAY, U32, CBufferLayout, 1)
KUBELET_UNIT = MapSpec("kubelet_unit", _ARRAY, U32, CKubeletUnit, 1)
KUBELET_REMADE = MapSpec("kubelet_remade", _ARRAY, U32, CKubeletRemade, 1)
DROP_SOURCES = MapSpec(
    *("drop_sources", _LRU_HASH, CDropSourceKey, CDropSource),
    MAX_DROP_SOURCES,
)
SOURCE_CGROUPS = MapSpec("source_cgroups", _LRU_HASH, U64, U32, MAX_SOURCE_CGROUPS)
RECENT_SOURCE = MapSpec("recent_source", _PERCPU_ARRAY, U32, CRecentSource, 1)
DROP_SOURCES_LOST = MapSpec("drop_src_lost", _PERCPU_ARRAY, U32, U64, 1)
REPLY_TABLE = MapSpec("reply_table", _ARRAY, U32, CReplySet, REPLY_SETS)
REPLIES = MapSpec("replies", _HASH_OF_MAPS, U32, U32, MAX_GATES, template=REPLY_TABLE.name)
REPLY_KEY = MapSpec("reply_key", _ARRAY, U32, CReplyKey, 1)
FRAGMENTS = MapSpec("fragments", _LRU_HASH, CFragment, U64, MAX_FRAGMENTS)
SOCKET_HISTORIES = MapSpec(
    "socket_histories", _SK_STORAGE, ctypes.c_int32, CSocketHistory, 0, _NO_PREALLOC
)
HOST_CONNECTS = MapSpec("host_connects", _LRU_HASH, U32, CHostConnect, MAX_HOST_CONNECTS)
CONNECT_CGROUPS = MapSpec(
    "connect_cgroups", _LRU_HASH, U64, CCgroupAncestors, MAX_CONNECTING_CGROUPS
)
CONNECT_LAYOUT = MapSpec("connect_layout", _ARRAY, U32, CConnectLayout, 1)
NODE_ADDRESSES = MapSpec(
    *("node_addresses", _LPM_TRIE, CNodeAddress, U32, MAX_NODE_ADDRESSES, _NO_PREALLOC)
)
DENIED_HOST_PROBES = MapSpec(
    *("denied_host_probes", _HASH, CHostProbe, U64),
    *(MAX_DENIED_HOST_PROBES, _NO_PREALLOC),
)
OLD_RAW_SOCKETS = MapSpec("old_raw_sockets", _HASH, U64, U32, MAX_OLD_RAW_SOCKETS, _NO_PREALLOC)
RAW_SOCKET_POLICY = MapSpec("raw_socket_policy", _ARRAY, U32, CRawSocketPolicy, 1)
RAW_SOCKET_CREATORS = MapSpec(
    "raw_socket_creators", _HASH, U64, U32, MAX_RAW_SOCKET_CREATORS, _NO_PREALLOC
)
RAW_SOCKET_COUNTS = MapSpec("raw_socket_counts", _ARRAY, U32, U64, 18 * VERDICT_COUNT)
RAW_SOCKET_SOURCES = MapSpec(
    *("raw_socket_sources", _LRU_HASH, CRawSocketSourceKey, CDropSource),
    MAX_RAW_SOCKET_SOURCES,
)
ADDRESSES = MapSpec("addresses", _HASH, CAddress, U32, MAX_ADDRESSES, _NO_PREALLOC)
DROP_EVENTS = MapSpec("drop_events", _RINGBUF, None, None, EVENT_RING_BYTES)
EVENT_BUDGET = MapSpec("event_budget", _PERCPU_ARRAY, U32, CEventBudget, 1)
PACKET_BUDGET = MapSpec("packet_budget", _PERCPU_ARRAY, U32, CEventBudget, 1)
CLOCK_READINGS = MapSpec("clock_readings", _PERCPU_ARRAY, U32, CClockReading, 1)
INJECTABLE = MapSpec("injectable", _ARRAY, U32, U64, INJECTABLE_IFINDEXES // 64, _MMAPABLE)
RELAY_TARGETS = MapSpec(
    *("relay_targets", _HASH, CRelayTargetKey, CAddress),
    *(MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_PODS = MapSpec(
    *("relay_pods", _HASH, CAddress, CRelayPod),
    *(MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_BEAT = MapSpec("relay_beat", _ARRAY, U32, U64, 1)
RELAY_BYPASSES = MapSpec("relay_bypasses", _LRU_HASH, U64, CAddress, MAX_RELAY_BYPASSES)

WATCHED_WORDS = MapSpec("words", _ARRAY, U32, CWatchedWords, 1)
WORD_CHANGES = MapSpec("word_changes", _RINGBUF, None, None, WORD_CHANGE_RING_BYTES)
"""Of `bpf.memory_watch`, not pinned."""

MAPS = (
    *(GATE_SLOTS, GATES, COUNTERS, FREQUENT_COUNTS, MORE_RULES, GATE_ADDRESSES_MAP),
    *(RULE_HITS, CONFIG, BUFFER_LAYOUT, DROP_SOURCES, DROP_SOURCES_LOST),
    *(SOURCE_CGROUPS, RECENT_SOURCE),
    *(
        REPLY_TABLE,
        REPLIES,
        REPLY_KEY,
        ADDRESSES,
        DROP_EVENTS,
        EVENT_BUDGET,
        PACKET_BUDGET,
        CLOCK_READINGS,
        INJECTABLE,
    ),
    *(RELAY_TARGETS, RELAY_PODS, RELAY_BEAT, RELAY_BYPASSES),
    *(FRAGMENTS, SOCKET_HISTORIES, NODE_ADDRESSES, OLD_RAW_SOCKETS, KUBELET_UNIT, KUBELET_REMADE),
    *(RAW_SOCKET_POLICY, RAW_SOCKET_CREATORS, RAW_SOCKET_COUNTS, RAW_SOCKET_SOURCES),
    *(DENIED_HOST_PROBES, HOST_CONNECTS, CONNECT_CGROUPS, CONNECT_LAYOUT),
)

GATE_EGRESS = "gate_egress"
GATE_INGRESS = "gate_ingress"
BRIDGE_GATE = "bridge_gate"
DEVICE_GATE = "device_gate"
UPLINK_GATE = "uplink_gate"
BARE_DEVICE_GATE = "bare_device_gate"
HAND_MADE_GATE = "hand_made_gate"
STAMP_SPOOFED = "stamp_spoofed"
TUNNEL_GATE = "tunnel_gate"
HOLD_SYNS = "hold_syns"
DROP_FORWARDED = "drop_forwarded"


def moving_copy(program: str) -> str:
    """The name of a program's second copy, attached for a moment while the program moves.

    A program can be in an interface's chain only once, but to change its position without a gap it
    must be there twice for a moment. Most nodes never need one.
    """
    return f"{program}_moving"


_TC_PROGRAMS = (
    *(GATE_EGRESS, GATE_INGRESS),
    *(BRIDGE_GATE, DEVICE_GATE, UPLINK_GATE, BARE_DEVICE_GATE),
    *(HAND_MADE_GATE, STAMP_SPOOFED, TUNNEL_GATE),
    *(HOLD_SYNS, DROP_FORWARDED),
)

# The function of each pinned program.
PROGRAMS = {name: name for name in _TC_PROGRAMS}

# Many nodes lack some of these devices, and the verifier takes 0.1 s for each.
DEFERRABLE = (UPLINK_GATE, DEVICE_GATE, BRIDGE_GATE, BARE_DEVICE_GATE)
"""Programs that are loaded when a device needs one, or once the first gates are attached; the most
frequent devices first."""

# Only gates have moving copies: other projects' programs are unusual on bridges, the loopback and
# the relay's pair.
MOVING_COPIES = {moving_copy(name): name for name in (GATE_EGRESS, GATE_INGRESS)}


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """A program for the root cgroup.

    type: `enum bpf_prog_type`; attach_type: `enum bpf_attach_type`; kernel_function: what a tracing
    program is attached to.
    """

    name: str
    type: int
    attach_type: int
    kernel_function: str = ""


_CGROUP_SKB, _SOCK, _SOCK_OPS, _SOCK_ADDR, _SOCKOPT = 8, 9, 13, 18, 25

RECORD_CONNECTS = HookSpec("hook_sockops", _SOCK_OPS, 3)
"""Without it hairpins pass (`src/hairpins.h`)."""

HOOKS = (
    HookSpec("hook_release", _SOCK, 34),
    HookSpec("hook_create", _SOCK, 2),
    HookSpec("hook_connect4", _SOCK_ADDR, 10),
    HookSpec("hook_connect6", _SOCK_ADDR, 11),
    HookSpec("hook_sendmsg4", _SOCK_ADDR, 14),
    HookSpec("hook_sendmsg6", _SOCK_ADDR, 15),
    HookSpec("hook_setsockopt", _SOCKOPT, 22),
    RECORD_CONNECTS,
)
"""Optional: gates enforce without them, and a kernel that rejects one loads the others."""

RAW_SOCKET_HOOKS = ("hook_release", "hook_create")
"""Those of `HOOKS` that mark raw sockets."""

RELAY_HOOKS = (
    HookSpec("relay_getpeername4", _SOCK_ADDR, 29),
    HookSpec("relay_getpeername6", _SOCK_ADDR, 30),
    HookSpec("relay_connect4", _SOCK_ADDR, 10),
    HookSpec("relay_connect6", _SOCK_ADDR, 11),
)
"""Attached by the relay's process (`bpf/redirect.py`), all or none, in this order: a redirected
process must not see the relay's address by getpeername.
"""

FOLLOW_KUBELET = HookSpec("follow_kubelet", 17, 0)
"""A raw tracepoint's program (`bpf/kubelet_unit.py`), optional as well."""

CREATE_PACKET_SOCKET = HookSpec("create_packet_socket", 26, 26, "security_socket_create")
"""A tracing program that may replace the function's result (`bpf/raw_socket_policy.py`)."""

TRACING_PROGRAMS = (FOLLOW_KUBELET, CREATE_PACKET_SOCKET)

EGRESS_HOOKS = (
    HookSpec("egress_connect4", _SOCK_ADDR, 10),
    HookSpec("egress_connect6", _SOCK_ADDR, 11),
    HookSpec("egress_sendmsg4", _SOCK_ADDR, 14),
    HookSpec("egress_sendmsg6", _SOCK_ADDR, 15),
    HookSpec("egress_packet", _CGROUP_SKB, 1),
)
"""Of HostEgressPolicies, loaded with the first one (`bpf/host_egress.py`)."""

OPTIONAL_PROGRAMS = (*HOOKS, *RELAY_HOOKS, *TRACING_PROGRAMS)
"""Pinned where the kernel accepts them: TRACING_PROGRAMS not if it is locked down, which lets no
program read the kernel's memory (lockdown=confidentiality)."""


def pack_address(address: IPAddress) -> bytes:
    """16 bytes in network order, IPv4 mapped (RFC 4291, 2.5.5.2)."""
    if address.version == 4:
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def unpack_address(packed: bytes) -> IPAddress:
    """The inverse of `pack_address`."""
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address

"""User space's twin of src/maps.h: the shape of each map.

Every opened map is compared with its `MapSpec`, so a pin of another layout is an error instead of
being misread.
"""

import ctypes
import dataclasses
from typing import Any

from bpf import abi

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


GATE_SLOTS = MapSpec("gate_slots", _HASH, U32, U32, abi.MAX_GATES, _NO_PREALLOC)
GATES = MapSpec("gates", _ARRAY, U32, abi.CGateSlot, abi.SLOT_COUNT)
COUNTERS = MapSpec("counters", _ARRAY, U32, abi.CCounters, abi.SLOT_COUNT)
FREQUENT_COUNTS = MapSpec(
    "frequent_counts", _PERCPU_ARRAY, U32, abi.CFrequentCounts, abi.SLOT_COUNT
)
MORE_RULES = MapSpec(
    *("more_rules", _HASH, abi.CMoreRulesKey, abi.CMoreRules),
    *(2 * abi.MAX_GATES, _NO_PREALLOC),
)
GATE_ADDRESSES_MAP = MapSpec(
    *("gate_addresses", _HASH, abi.CGateAddress, U32, abi.MAX_MORE_ADDRESSES, _NO_PREALLOC)
)
RULE_HITS = MapSpec("rule_hits", _PERCPU_HASH, U32, U64, abi.MAX_RULE_HITS, _NO_PREALLOC)
CONFIG = MapSpec("config", _ARRAY, U32, abi.CConfig, 1)
BUFFER_LAYOUT = MapSpec("buffer_layout", _ARRAY, U32, abi.CBufferLayout, 1)
KUBELET_UNIT = MapSpec("kubelet_unit", _ARRAY, U32, abi.CKubeletUnit, 1)
KUBELET_REMADE = MapSpec("kubelet_remade", _ARRAY, U32, abi.CKubeletRemade, 1)
DROP_SOURCES = MapSpec(
    *("drop_sources", _LRU_HASH, abi.CDropSourceKey, abi.CDropSource),
    abi.MAX_DROP_SOURCES,
)
SOURCE_CGROUPS = MapSpec("source_cgroups", _LRU_HASH, U64, U32, abi.MAX_SOURCE_CGROUPS)
RECENT_SOURCE = MapSpec("recent_source", _PERCPU_ARRAY, U32, abi.CRecentSource, 1)
DROP_SOURCES_LOST = MapSpec("drop_src_lost", _PERCPU_ARRAY, U32, U64, 1)
REPLY_TABLE = MapSpec("reply_table", _ARRAY, U32, abi.CReplySet, abi.REPLY_SETS)
REPLIES = MapSpec("replies", _HASH_OF_MAPS, U32, U32, abi.MAX_GATES, template=REPLY_TABLE.name)
REPLY_KEY = MapSpec("reply_key", _ARRAY, U32, abi.CReplyKey, 1)
FRAGMENTS = MapSpec("fragments", _LRU_HASH, abi.CFragment, U64, abi.MAX_FRAGMENTS)
SOCKET_HISTORIES = MapSpec(
    "socket_histories", _SK_STORAGE, ctypes.c_int32, abi.CSocketHistory, 0, _NO_PREALLOC
)
HOST_CONNECTS = MapSpec("host_connects", _LRU_HASH, U32, abi.CHostConnect, abi.MAX_HOST_CONNECTS)
CONNECT_CGROUPS = MapSpec(
    "connect_cgroups", _LRU_HASH, U64, abi.CCgroupAncestors, abi.MAX_CONNECTING_CGROUPS
)
CONNECT_LAYOUT = MapSpec("connect_layout", _ARRAY, U32, abi.CConnectLayout, 1)
NODE_ADDRESSES = MapSpec(
    *("node_addresses", _LPM_TRIE, abi.CNodeAddress, U32, abi.MAX_NODE_ADDRESSES, _NO_PREALLOC)
)
DENIED_HOST_PROBES = MapSpec(
    *("denied_host_probes", _HASH, abi.CHostProbe, U64),
    *(abi.MAX_DENIED_HOST_PROBES, _NO_PREALLOC),
)
OLD_RAW_SOCKETS = MapSpec("old_raw_sockets", _HASH, U64, U32, abi.MAX_OLD_RAW_SOCKETS, _NO_PREALLOC)
RAW_SOCKET_POLICY = MapSpec("raw_socket_policy", _ARRAY, U32, abi.CRawSocketPolicy, 1)
RAW_SOCKET_CREATORS = MapSpec(
    "raw_socket_creators", _HASH, U64, U32, abi.MAX_RAW_SOCKET_CREATORS, _NO_PREALLOC
)
RAW_SOCKET_COUNTS = MapSpec("raw_socket_counts", _ARRAY, U32, U64, 18 * abi.VERDICT_COUNT)
RAW_SOCKET_SOURCES = MapSpec(
    *("raw_socket_sources", _LRU_HASH, abi.CRawSocketSourceKey, abi.CDropSource),
    abi.MAX_RAW_SOCKET_SOURCES,
)
ADDRESSES = MapSpec("addresses", _HASH, abi.CAddress, U32, abi.MAX_ADDRESSES, _NO_PREALLOC)
DROP_EVENTS = MapSpec("drop_events", _RINGBUF, None, None, abi.EVENT_RING_BYTES)
EVENT_BUDGET = MapSpec("event_budget", _PERCPU_ARRAY, U32, abi.CEventBudget, 1)
PACKET_BUDGET = MapSpec("packet_budget", _PERCPU_ARRAY, U32, abi.CEventBudget, 1)
CLOCK_READINGS = MapSpec("clock_readings", _PERCPU_ARRAY, U32, abi.CClockReading, 1)
INJECTABLE = MapSpec("injectable", _ARRAY, U32, U64, abi.INJECTABLE_IFINDEXES // 64, _MMAPABLE)
RELAY_TARGETS = MapSpec(
    *("relay_targets", _HASH, abi.CRelayTargetKey, abi.CAddress),
    *(abi.MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_PODS = MapSpec(
    *("relay_pods", _HASH, abi.CAddress, abi.CRelayPod),
    *(abi.MAX_RELAY_TARGETS, _NO_PREALLOC),
)
RELAY_BEAT = MapSpec("relay_beat", _ARRAY, U32, U64, 1)
RELAY_BYPASSES = MapSpec("relay_bypasses", _LRU_HASH, U64, abi.CAddress, abi.MAX_RELAY_BYPASSES)

WATCHED_WORDS = MapSpec("words", _ARRAY, U32, abi.CWatchedWords, 1)
WORD_CHANGES = MapSpec("word_changes", _RINGBUF, None, None, abi.WORD_CHANGE_RING_BYTES)
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

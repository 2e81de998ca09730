"""User space's twin of src/abi.h: a test compares every struct with the compiler's layout."""

import ctypes
import ipaddress

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


def pack_address(address: IPAddress) -> bytes:
    """16 bytes in network order, IPv4 mapped (RFC 4291, 2.5.5.2)."""
    if address.version == 4:
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def unpack_address(packed: bytes) -> IPAddress:
    """The inverse of `pack_address`."""
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address

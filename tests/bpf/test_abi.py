"""Packing and unpacking of what the maps hold."""

import ctypes
import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from bpf import abi, map_specs
from tests.bpf import headers

# ::ffff:0:0/96 is how IPv4 is written down, so such an address comes back as IPv4.
addresses = st.ip_addresses().filter(lambda it: it.version == 4 or it.ipv4_mapped is None)


@given(address=addresses)
def test_address_comes_back(address: abi.IPAddress) -> None:
    packed = abi.pack_address(address)
    assert len(packed) == ctypes.sizeof(abi.CAddress)
    assert abi.unpack_address(packed) == address


def test_ipv4_is_mapped() -> None:
    packed = abi.pack_address(ipaddress.IPv4Address("198.18.0.1"))
    assert packed == ipaddress.IPv6Address("::ffff:198.18.0.1").packed


def test_constants_are_those_of_the_c_side() -> None:
    names = (
        "REASON_SLOTS",
        "COUNTER_SLOTS",
        "GATE_ADDRESSES",
        "MAX_GATE_ADDRESSES",
        "GATE_RULES",
        "GATE_FIRST_RULES",
        "QUESTION_SETS",
        "CROWD_SETS",
        "QUESTION_BUCKETS",
        "PORT_FLOWS",
        "REPLIED",
        "REPLY_WAYS",
        "REPLY_KEY_WORDS",
        "MAX_RULE_HITS",
        "MAX_DROP_SOURCES",
        "MAX_SOURCE_CGROUPS",
        "CGROUP_SOURCES",
        "MANY_PORTS",
        "MAX_FRAGMENTS",
        "MAX_NODE_ADDRESSES",
        "MAX_OLD_RAW_SOCKETS",
        "MAX_DENIED_HOST_PROBES",
        "MAX_GATES",
        "MAX_ADDRESSES",
        "MAX_MORE_ADDRESSES",
        "HOST_SLOT",
        "FALLBACK_SLOT",
        "FIRST_SLOT",
        "TUNNEL_PORTS",
        "EVENT_RING_BYTES",
        "INJECTABLE_IFINDEXES",
        "MAX_WATCHED_WORDS",
        "MAX_RELAY_TARGETS",
        "KUBELET_PATH_BYTES",
        "RELAY_BEAT_LIMIT_NS",
        "MAX_RELAY_BYPASSES",
        "GATE_ANY_ADDRESS",
        "GATE_NO_FALLBACK",
        "GATE_HAS_MORE_ADDRESSES",
    )
    ours = {name: getattr(abi, name) for name in names}
    assert ours == {name: headers.constant(name) for name in names}


def test_per_cpu_values_need_no_padding() -> None:
    """The kernel rounds a CPU's value up to 8 bytes, and readers count on there being no rest."""
    assert all(spec.value_size % 8 == 0 for spec in map_specs.MAPS if spec.is_per_cpu)


def test_maps_differ_in_how_they_are_read() -> None:
    """Without keys, by a value for each CPU, through mmap(2)."""
    assert {spec.name for spec in map_specs.MAPS if not spec.is_listed} == {
        *("drop_events", "socket_histories"),
    }
    assert [spec.name for spec in map_specs.MAPS if (spec.key_size, spec.value_size) == (0, 0)] == [
        "drop_events"
    ]
    assert [spec.name for spec in map_specs.MAPS if spec.is_mmapable] == ["injectable"]
    assert {spec.name for spec in map_specs.MAPS if spec.is_per_cpu} == {
        *("frequent_counts", "rule_hits", "drop_src_lost", "recent_source"),
        *("event_budget", "packet_budget", "clock_readings"),
    }


def test_struct_has_no_hole() -> None:
    """The kernel compares and copies all bytes of a value, so none may be left to chance."""
    for structure in (
        *(abi.CAddress, abi.CRule, abi.CGate, abi.CConfig),
        *(abi.CGateSlot, abi.CGateAddress, abi.CMoreRulesKey, abi.CMoreRules),
        *(abi.CDropSourceKey, abi.CDropSource, abi.CRecentSource),
        *(
            abi.CCounters,
            abi.CFrequentCounts,
            abi.CFlow,
            abi.CReplySlot,
            abi.CReplySet,
            abi.CReplyKey,
        ),
        *(abi.CFragment, abi.CNodeAddress, abi.CSocketHistory, abi.CHostProbe),
        *(abi.CDropEvent, abi.CEventBudget),
        *(abi.CRelayTargetKey, abi.CRelayPod),
        *(abi.CKubeletUnit, abi.CKubeletRemade),
        *(abi.CWatchedWord, abi.CWatchedWords),
    ):
        end = 0
        for name, kind in structure._fields_:
            assert getattr(structure, name).offset == end
            end += ctypes.sizeof(kind)
        assert end == ctypes.sizeof(structure)

"""The C side as bcc sees it, compared with its Python twin. bcc runs in a process of its own."""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bpf import abi, sources

pytestmark = pytest.mark.kernel

_DESCRIBE = """
import ctypes, json, sys
import bcc
from bpf import loader, sources
from bpf.features import compiler_flags

def layout(type):
    if hasattr(type, "_fields_"):
        return [[name, getattr(type, name).offset, ctypes.sizeof(kind), layout(kind)]
                for name, kind, *_ in type._fields_]
    if hasattr(type, "_length_"):
        return [type._length_, layout(type._type_)]
    return ctypes.sizeof(type)

features = loader.PROGRAM_SET.features
flags = compiler_flags(features, features)
module = bcc.BPF(text=sources.expand("programs.c"), cflags=flags)
names = sys.argv[1:]
print(json.dumps({name: [layout(module[name].Key),
                         layout(getattr(module[name], "sLeaf", module[name].Leaf))]
                  for name in names}))
"""


def layout(type_: Any) -> object:
    """Names, offsets and sizes, all the way down."""
    if issubclass(type_, ctypes.Structure):
        return [
            [name, getattr(type_, name).offset, ctypes.sizeof(kind), layout(kind)]
            for name, kind, *_ in type_._fields_
        ]
    if issubclass(type_, ctypes.Array):
        return [type_._length_, layout(type_._type_)]
    return ctypes.sizeof(type_)


def with_values() -> list[abi.MapSpec]:
    """All but the ring, whose records the C side casts: test_hooks.py reads some."""
    return [spec for spec in abi.MAPS if spec.value_size]


@pytest.fixture(scope="module")
def seen_by_bcc(isolated: None) -> dict[str, object]:
    output = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, *(spec.name for spec in with_values())],
        env={**os.environ, "BCC_KERNEL_SOURCE": str(sources.KERNEL_SOURCE)},
        check=True,
        capture_output=True,
    ).stdout
    found: dict[str, object] = json.loads(output)
    return found


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gate_slots", ctypes.c_uint32, ctypes.c_uint32),
        ("gates", ctypes.c_uint32, abi.CGateSlot),
        ("more_rules", abi.CMoreRulesKey, abi.CMoreRules),
        ("gate_addresses", abi.CGateAddress, ctypes.c_uint32),
        ("counters", ctypes.c_uint32, abi.CCounters),
        ("frequent_counts", ctypes.c_uint32, abi.CFrequentCounts),
        ("config", ctypes.c_uint32, abi.CConfig),
        ("drop_sources", abi.CDropSourceKey, abi.CDropSource),
        ("source_cgroups", ctypes.c_uint64, ctypes.c_uint32),
        ("recent_source", ctypes.c_uint32, abi.CRecentSource),
        ("reply_table", ctypes.c_uint32, abi.CReplySet),
        ("fragments", abi.CFragment, ctypes.c_uint64),
        ("chosen_sources", abi.CChosenSource, ctypes.c_uint64),
        ("denied_host_probes", abi.CHostProbe, ctypes.c_uint64),
        ("raw_sockets", ctypes.c_uint64, ctypes.c_uint64),
        ("reply_key", ctypes.c_uint32, abi.CReplyKey),
        ("rule_hits", ctypes.c_uint32, ctypes.c_uint64),
        ("addresses", abi.CAddress, ctypes.c_uint32),
        ("event_budget", ctypes.c_uint32, abi.CEventBudget),
        ("packet_budget", ctypes.c_uint32, abi.CEventBudget),
        ("injectable", ctypes.c_uint32, ctypes.c_uint64),
        ("relay_targets", abi.CRelayTargetKey, abi.CAddress),
        ("relay_pods", abi.CAddress, abi.CRelayPod),
        ("relay_beat", ctypes.c_uint32, ctypes.c_uint64),
        ("kubelet_unit", ctypes.c_uint32, abi.CKubeletUnit),
        ("kubelet_remade", ctypes.c_uint32, abi.CKubeletRemade),
        ("raw_socket_policy", ctypes.c_uint32, abi.CRawSocketPolicy),
        ("raw_socket_creators", ctypes.c_uint64, ctypes.c_uint32),
        ("raw_socket_counts", ctypes.c_uint32, ctypes.c_uint64),
        ("raw_socket_sources", abi.CRawSocketSourceKey, abi.CDropSource),
    ],
)
def test_twin_has_the_layout_of_the_c_side(
    seen_by_bcc: dict[str, object], name: str, key: type, value: type
) -> None:
    assert seen_by_bcc[name] == [layout(key), layout(value)]


def test_every_map_has_a_twin(seen_by_bcc: dict[str, object]) -> None:
    assert seen_by_bcc.keys() == {spec.name for spec in with_values()}

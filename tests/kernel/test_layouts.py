"""The C side as bcc sees it, compared with its Python twin. bcc runs in a process of its own."""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bpf import map_specs, sources

pytestmark = pytest.mark.kernel

_DESCRIBE = """
import ctypes, json, sys
import bcc
from bpf import compiling, loader, memory_watch, sources
from bpf.features import compiler_flags

def layout(type):
    if hasattr(type, "_fields_"):
        return [[name, getattr(type, name).offset, ctypes.sizeof(kind), layout(kind)]
                for name, kind, *_ in type._fields_]
    if hasattr(type, "_length_"):
        return [type._length_, layout(type._type_)]
    return ctypes.sizeof(type)

def described(module, name):
    # Not module[name]: bcc has no class for the storage of sockets.
    for describe in (bcc.lib.bpf_table_key_desc, bcc.lib.bpf_table_leaf_desc):
        text = describe(module.module, name.encode())
        yield layout(bcc.BPF._decode_table_type(json.loads(text)))

found = {}
for programs in (loader.PROGRAM_SET, memory_watch.PROGRAM_SET):
    flags = [*compiling.FLAGS, *compiler_flags(programs.features, programs.features)]
    module = bcc.BPF(text=sources.expand(programs.source), cflags=flags)
    for spec in programs.maps:
        if spec.name in sys.argv[1:]:
            found[spec.name] = list(described(module, spec.name))
print(json.dumps(found))
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


def with_values() -> list[map_specs.MapSpec]:
    """All but the rings, whose records the C side casts: test_hooks.py reads some."""
    return [spec for spec in (*map_specs.MAPS, map_specs.WATCHED_WORDS) if spec.value_size]


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


@pytest.mark.parametrize("spec", with_values(), ids=lambda spec: spec.name)
def test_twin_has_the_layout_of_the_c_side(
    seen_by_bcc: dict[str, object], spec: map_specs.MapSpec
) -> None:
    assert seen_by_bcc[spec.name] == [layout(spec.key), layout(spec.value)]


def test_every_map_has_a_twin(seen_by_bcc: dict[str, object]) -> None:
    assert seen_by_bcc.keys() == {spec.name for spec in with_values()}

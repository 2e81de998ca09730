"""Entries of maps as our own reader decodes them, and as bpftool does by their type information."""

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from agent.operate.pinned import bpftool
from agent.operate.pinned import maps as pinned_maps
from bpf import abi, artefacts, listeners, loader, map_specs, map_values, maps, pins, syscalls
from bpf.pinning import Origin
from probes.netns import netns_cookie

pytestmark = pytest.mark.kernel

# Large arrays are printed in full.
_ENTRIES = 3
_WITHOUT_TYPES = {
    spec.name for spec in (*map_specs.MAPS, *listeners.MAPS) if not spec.value or spec.template
}
_DECODED = [
    spec
    for spec in pinned_maps.SPECS.values()
    if spec.is_listed and spec.name not in {*_WITHOUT_TYPES, map_specs.NODE_ADDRESSES.name}
]
"""Keys of the last one begin with a length that random numbers exceed."""


@pytest.fixture
def directory(fresh_pins: pins.Pins) -> pathlib.Path:
    return fresh_pins.bpffs


def filled(kind: Any, numbers: random.Random) -> Any:
    """A value with no byte at rest, and text where the type has characters."""
    made = kind()
    if isinstance(made, ctypes.Structure):
        for name, member, *_ in made._fields_:
            if isinstance(getattr(made, name), bytes):  # an array of characters
                setattr(made, name, f"text{numbers.randrange(100)}".encode())
            else:
                setattr(made, name, filled(member, numbers))
    elif isinstance(made, ctypes.Array):
        for index in range(len(made)):
            made[index] = filled(kind._type_, numbers)
    else:
        made = kind(numbers.getrandbits(8 * ctypes.sizeof(kind)))
        return made if kind not in (ctypes.c_uint8, ctypes.c_uint16) else made.value
    return made


@contextlib.contextmanager
def pinned(spec: map_specs.MapSpec, path: pathlib.Path) -> Iterator[maps.Map]:
    made = maps.Map(maps.create(spec), spec)
    with made:
        syscalls.pin(made.fd, str(path))
        try:
            yield made
        finally:
            path.unlink()


def dump(path: pathlib.Path) -> list[dict[str, Any]]:
    command = [bpftool.find(), "-j", "map", "dump", "pinned", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return [entry["formatted"] for entry in json.loads(done.stdout)]


@pytest.mark.parametrize("spec", _DECODED, ids=lambda spec: spec.name)
def test_decoded_entries_are_those_of_bpftool(
    directory: pathlib.Path, spec: map_specs.MapSpec
) -> None:
    numbers = random.Random(spec.name)
    is_array = spec.type in (2, 6)
    spec = dataclasses.replace(spec, max_entries=_ENTRIES if is_array else spec.max_entries)
    cpus = maps.possible_cpus() if spec.is_per_cpu else 1
    with pinned(spec, directory / spec.name) as made:
        for number in range(min(_ENTRIES, spec.max_entries)):
            key = number.to_bytes(4, "little") if is_array else bytes(filled(spec.key, numbers))
            made.set(key, b"".join(bytes(filled(spec.value, numbers)) for _ in range(cpus)))
        ours = []
        for key, value in made.items_by_key():
            entry = {"key": map_values.decode(spec.key, key, raw=True)}
            decoded = [
                map_values.decode(spec.value, one, raw=True)
                for one in pinned_maps.cpus(spec, value)
            ]
            if spec.is_per_cpu:
                entry["values"] = [{"cpu": cpu, "value": one} for cpu, one in enumerate(decoded)]
            else:
                entry["value"] = decoded[0]
            ours.append(entry)
        theirs = dump(directory / spec.name)
    assert sorted(ours, key=str) == sorted(theirs, key=str)
    assert len(ours) == min(_ENTRIES, spec.max_entries)


def test_maps_of_maps_are_read_with_the_ids_that_bpftool_prints(directory: pathlib.Path) -> None:
    template = maps.create_template(map_specs.REPLY_TABLE)
    outer = maps.Map(maps.create(map_specs.REPLIES, template), map_specs.REPLIES)
    inner = maps.create_like(map_specs.REPLY_TABLE, template)
    plain = syscalls.map_create(2, 4, map_specs.REPLY_TABLE.value_size, abi.REPLY_SETS)
    with outer:
        # podgate-cni and earlier versions create tables without type information.
        for number, table in enumerate((inner, plain)):
            outer.set(number.to_bytes(4, "little"), table.to_bytes(4, "little"))
        read = {
            map_values.decode(map_specs.U32, key): map_values.decode(map_specs.U32, value)
            for key, value in outer.items_by_key()
        }
        assert maps.has_types(inner) is maps.has_types(template)
    assert sorted(read) == [0, 1]
    for number, table in enumerate((inner, plain)):
        shown = subprocess.run(
            [bpftool.find(), "-j", "map", "show", "id", str(read[number])],
            check=True,
            capture_output=True,
        ).stdout
        assert json.loads(shown)["bytes_value"] == map_specs.REPLY_TABLE.value_size
        os.close(table)
    os.close(template)


@pytest.mark.parametrize("origin", [Origin.PREBUILT, Origin.COMPILED])
def test_every_map_has_type_information_however_programs_were_compiled(
    fresh_pins: pins.Pins,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: Origin,
) -> None:
    if origin is Origin.COMPILED:
        monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    loaded = asyncio.run(loader.load(fresh_pins))
    loaded.close()
    assert loaded.outcome.origin is origin
    names = {spec.name for spec in map_specs.MAPS}
    if netns_cookie() is not None:  # listener events need it
        asyncio.run(listeners.load(fresh_pins))
        names |= {spec.name for spec in listeners.MAPS}
    found = pinned_maps.read(pinned_maps.paths(fresh_pins))
    assert {one.name for one in found} == names
    without_types = names & (_WITHOUT_TYPES | _without_here())
    assert {one.name for one in found if not one.has_types} == without_types
    # An empty trie has no memory of its own.
    assert all(one.memory_bytes > 0 for one in found if one.type != "lpm_trie")


def _without_here() -> set[str]:
    """From Linux 5.15 up to 6.1 a template has no type information (`maps.create_template`)."""
    template = maps.create_template(map_specs.REPLY_TABLE)
    try:
        return set() if maps.has_types(template) else {map_specs.REPLY_TABLE.name}
    finally:
        os.close(template)

"""Invalid input and failures of the machine: one sentence each, and no partial change."""

import ctypes
import ipaddress
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, artefacts, compile_cache, errors, loader, map_specs, pins
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel

MS_RDONLY, MS_REMOUNT = 1, 32
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("misread", 1)


def enforcing(pod: labs.LabPod) -> GateConfig:
    return GateConfig(Mode.ENFORCE, pod.addresses)


def test_interface_of_another_namespace_is_no_interface_here(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """Interface numbers belong to a namespace: those of a pod have no meaning on the host."""
    taken = {index for index, _ in socket.if_nameindex()}
    foreign = next(number for number in range(2, 1 << 16) if number not in taken)
    with pytest.raises(errors.AttachError, match=f"interface {foreign}: .*No such device"):
        gates.install(foreign, enforcing(pod))
    assert gates.installed() == {}
    assert list(loaded.map(map_specs.GATE_SLOTS).items()) == []
    assert list(loaded.map(map_specs.ADDRESSES).items()) == []


@pytest.fixture
def kubelet(loaded: loader.Loaded) -> Iterator[Cgroup]:
    """Identified, and without processes."""
    config = NodeConfig(loaded)
    with cgroups.cgroup() as found:
        config.set_kubelet(found.id)
        yield found
        config.set_kubelet(None)


@pytest.fixture
def no_slots(lab: labs.Lab, gates: Gates, loaded: loader.Loaded) -> Iterator[labs.LabPod]:
    """The only pod with a slot; all others are taken."""
    first = lab.add_pod("first", 2)
    gates.install(first.ifindex, enforcing(first))
    table = loaded.map(map_specs.GATE_SLOTS)
    (own,) = (value for _, value in table.items())
    free = {number.to_bytes(4, "little") for number in range(abi.FIRST_SLOT, abi.SLOT_COUNT)}
    taken = {
        (1 << 20 | number).to_bytes(4, "little"): slot for number, slot in enumerate(free - {own})
    }
    for key, slot in taken.items():
        table.set(key, slot)
    yield first
    for key in taken:
        table.delete(key)


def test_full_map_leaves_other_gates_alone(gates: Gates, no_slots: labs.LabPod) -> None:
    assert traffic.node_is_dropped(no_slots, 4)
    gates.install(no_slots.ifindex, GateConfig(Mode.AUDIT, no_slots.addresses))
    assert gates.installed()[no_slots.ifindex] == GateConfig(Mode.AUDIT, no_slots.addresses)


def test_audit_gate_that_finds_a_full_map_is_an_error(
    gates: Gates, pod: labs.LabPod, no_slots: labs.LabPod
) -> None:
    with pytest.raises(errors.AttachError, match="the map gates is full; it holds 4096 ent"):
        gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)


def test_enforcing_gate_that_finds_a_full_map_is_closed_and_reports_it(
    gates: Gates, pod: labs.LabPod, no_slots: labs.LabPod, kubelet: Cgroup
) -> None:
    """And it gets its own configuration when there is room."""
    for _ in range(2):
        problem = gates.install(pod.ifindex, enforcing(pod))
        assert "the map gates is full; it holds 4096 entries" in problem
        for version in (4, 6):
            assert traffic.node_is_dropped(pod, version)
    # This frees the slots of interfaces that do not exist, too.
    assert gates.installed()[pod.ifindex] is None
    assert gates.install(pod.ifindex, enforcing(pod)) == ""
    assert gates.installed()[pod.ifindex] == enforcing(pod)
    assert traffic.node_is_dropped(pod, 4)
    gates.remove(pod.ifindex)
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)


def test_full_map_of_addresses_costs_names_and_no_gate(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    table = loaded.map(map_specs.ADDRESSES)
    keys = [
        abi.pack_address(ipaddress.IPv6Address((0x20010DB8 << 96) | number))
        for number in range(abi.MAX_ADDRESSES)
    ]
    for key in keys:
        table.set(key, bytes(4))
    try:
        gates.install(pod.ifindex, enforcing(pod))
        assert traffic.node_is_dropped(pod, 4)
    finally:
        for key in keys:
            table.delete(key)


async def test_read_only_bpffs_is_an_error(isolated: None, tmp_path: pathlib.Path) -> None:
    mount = labs.LAB_DIRECTORY / "readonly"
    mount.mkdir()
    path = os.fsencode(mount)
    assert _libc.mount(b"bpf", path, b"bpf", 0, None) == 0
    try:
        assert _libc.mount(b"bpf", path, b"bpf", MS_REMOUNT | MS_RDONLY, None) == 0
        with pytest.raises(errors.PinError, match="podgate needs it mounted read-write"):
            await loader.load(pins.Pins(mount))
        assert "podgate" not in os.listdir(mount)
    finally:
        assert _libc.umount2(path, 0) == 0
        mount.rmdir()


@pytest.fixture
def nothing_prebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(artefacts.DIRECTORY_VARIABLE)


@pytest.fixture
def short_of_memory(
    nothing_prebuilt: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Started processes get 150 MB of address space; LLVM alone maps more."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v 150000\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv(compile_cache.DIRECTORY_VARIABLE, raising=False)


async def test_compiler_without_enough_memory_is_one_sentence_and_leaves_nothing(
    fresh_pins: pins.Pins, short_of_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.CompileError) as caught:
        await loader.load(fresh_pins)
    assert "\n" not in str(caught.value)
    assert [path for path in fresh_pins.programs.iterdir() if "unfinished" not in path.name] == []
    monkeypatch.undo()
    loaded = await loader.load(fresh_pins)
    loaded.close()


async def test_killed_compiler_is_an_error(
    fresh_pins: pins.Pins,
    nothing_prebuilt: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """As the kernel does where a container has used up its memory."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(errors.CompileError, match="killed by signal 9; it needs 250 MB of memory"):
        await loader.load(fresh_pins)

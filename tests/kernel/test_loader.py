"""Loading: once, whole or not at all, and never with the compiler in this process."""

import asyncio
import dataclasses
import errno
import fcntl
import os
import pathlib
import sys
from typing import Any, NoReturn

import pytest

from bpf import (
    abi,
    artefacts,
    compile_cache,
    compiling,
    errors,
    kernel_layouts,
    listeners,
    loader,
    map_specs,
    maps,
    pinning,
    pins,
    program_specs,
    sources,
    syscalls,
)
from bpf.pinning import Origin
from probes.netns import netns_cookie
from tests.kernel import foreign, offers, versions

pytestmark = pytest.mark.kernel


@pytest.fixture
def nothing_prebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(artefacts.DIRECTORY_VARIABLE)


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gates at egress and of devices, for each of which the verifier takes 0.2 s."""
    small = {
        name: program_specs.PROGRAMS[name]
        for name in (program_specs.GATE_INGRESS, program_specs.STAMP_SPOOFED)
    }
    specs = loader.PROGRAM_SET.programs
    chosen = tuple(
        spec for spec in specs if spec.name in small or spec.name not in program_specs.PROGRAMS
    )
    monkeypatch.setattr(program_specs, "PROGRAMS", small)
    monkeypatch.setattr(
        loader, "PROGRAM_SET", dataclasses.replace(loader.PROGRAM_SET, programs=chosen)
    )


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)


async def load(installation: pins.Pins) -> tuple[Origin, list[int]]:
    """Where the programs came from, and their ids."""
    loaded = await loader.load(installation)
    ids = [syscalls.program_id(fd) for fd in loaded.programs.values()]
    loaded.close()
    return loaded.outcome.origin, ids


def _mapped_files() -> str:
    return pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")


async def test_second_load_uses_the_pins(
    fresh_pins: pins.Pins, nothing_prebuilt: None, request: pytest.FixtureRequest
) -> None:
    origin, ids = await load(fresh_pins)
    assert origin is Origin.COMPILED
    request.getfixturevalue("no_compiler")
    assert await load(fresh_pins) == (Origin.PINNED, ids)


async def test_layout_of_the_kernel_s_buffers_is_written(
    fresh_pins: pins.Pins, small_programs: None
) -> None:
    loaded = await loader.load(fresh_pins)
    content = loaded.map(map_specs.BUFFER_LAYOUT).get(bytes(4))
    loaded.close()
    assert content is not None
    layout = abi.CBufferLayout.from_buffer_copy(content)
    assert layout.csum_offset == layout.csum_start + 2 > 2
    assert layout.data == layout.head + 8 > 8


def accepted_programs() -> list[str]:
    names = [*program_specs.PROGRAMS, *(hook.name for hook in program_specs.OPTIONAL_PROGRAMS)]
    if not offers.rejects_packet_sockets():
        names.remove(program_specs.CREATE_PACKET_SOCKET.name)
    if netns_cookie() is None:  # programs at setsockopt read it since f1248dee954c (Linux 5.15)
        names.remove("hook_setsockopt")
    return names


async def test_layout_that_cannot_be_written_leaves_no_descriptor_open(
    fresh_pins: pins.Pins, small_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(fresh_pins)

    def fail(layouts: maps.Map) -> NoReturn:
        raise errors.BpfError(errno.EPERM, "cannot write")

    monkeypatch.setattr(kernel_layouts, "write_buffer", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(errors.BpfError, match="cannot write"):
        await loader.load(fresh_pins)
    assert os.listdir("/proc/self/fd") == before


async def test_pins_are_those_that_the_description_lists(fresh_pins: pins.Pins) -> None:
    await load(fresh_pins)
    assert sorted(os.listdir(fresh_pins.maps)) == sorted(spec.name for spec in map_specs.MAPS)
    for spec in map_specs.MAPS:
        maps.Map.open(fresh_pins.map(spec), spec).close()
    assert os.listdir(fresh_pins.programs) == [sources.fingerprint()]
    pinned = os.listdir(fresh_pins.programs / sources.fingerprint())
    assert sorted(pinned) == sorted(accepted_programs())


async def test_moving_copies_are_loaded_once_and_only_when_they_are_needed(
    fresh_pins: pins.Pins, request: pytest.FixtureRequest
) -> None:
    loaded = await loader.load(fresh_pins)
    assert len(loaded.copies(program_specs.GATE_EGRESS)) == 1
    await loader.load_moving_copies(fresh_pins, loaded)
    ids = [syscalls.program_id(fd) for fd in loaded.copies(program_specs.GATE_EGRESS)]
    assert len(set(ids)) == 2
    loaded.close()
    fresh_pins.discard_other_programs(sources.fingerprint())
    request.getfixturevalue("no_compiler")
    again = await loader.load(fresh_pins)
    await loader.load_moving_copies(fresh_pins, again)
    assert [syscalls.program_id(fd) for fd in again.copies(program_specs.GATE_EGRESS)] == ids
    again.close()


async def test_deferred_programs_are_added_to_those_that_are_loaded(
    fresh_pins: pins.Pins, request: pytest.FixtureRequest
) -> None:
    loaded = await loader.load(fresh_pins, defers=True)
    assert loaded.outcome.origin is Origin.PREBUILT
    assert loaded.programs.keys().isdisjoint(program_specs.DEFERRABLE)
    first = {name: syscalls.program_id(fd) for name, fd in loaded.programs.items()}
    request.getfixturevalue("no_compiler")
    needed = [program_specs.UPLINK_GATE, program_specs.BRIDGE_GATE]
    # A device needs one while the others are loaded.
    await asyncio.gather(
        loader.load_deferred(fresh_pins, loaded, needed), loader.load_deferred(fresh_pins, loaded)
    )
    added = {name: syscalls.program_id(loaded.programs[name]) for name in program_specs.DEFERRABLE}
    loaded.close()
    assert (await load(fresh_pins))[0] is Origin.PINNED
    again = await loader.load(fresh_pins, defers=True)
    assert {name: syscalls.program_id(fd) for name, fd in again.programs.items()} == first | added
    again.close()


async def test_an_agent_that_defers_no_program_keeps_those_that_are_loaded(
    fresh_pins: pins.Pins,
) -> None:
    loaded = await loader.load(fresh_pins, defers=True)
    first = {syscalls.program_id(fd) for fd in loaded.programs.values()}
    loaded.close()
    origin, ids = await load(fresh_pins)
    assert origin is Origin.PINNED
    assert len(ids) == len(first) + len(program_specs.DEFERRABLE)
    assert first < {*ids}


async def test_an_agent_that_is_stopped_while_it_verifies_deferred_programs_has_locked_nothing(
    fresh_pins: pins.Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await loader.load(fresh_pins, defers=True)).close()
    are_locked = []
    load_program = syscalls.program_load

    def load_and_look(*arguments: Any, **options: Any) -> int:
        are_locked.append(is_locked(fresh_pins.programs))
        return load_program(*arguments, **options)

    monkeypatch.setattr(syscalls, "program_load", load_and_look)
    await load(fresh_pins)
    assert len(are_locked) >= len(program_specs.DEFERRABLE)
    assert not any(are_locked)


def is_locked(directory: pathlib.Path) -> bool:
    """Shared: programs are loaded by several threads, each of which tests this."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


async def test_load_that_another_process_locks_out_ends_with_its_pid(
    fresh_pins: pins.Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_pins.prepare()
    monkeypatch.setattr(pinning, "LOCK_SECONDS", 0.05)
    descriptor = os.open(fresh_pins.programs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(errors.PinError, match=f"process {os.getpid()} has kept .* locked"):
            await loader.load(fresh_pins)
    finally:
        os.close(descriptor)
    assert (await load(fresh_pins))[0] is Origin.PREBUILT


async def test_what_is_compiled_is_loaded_whole(
    fresh_pins: pins.Pins, nothing_prebuilt: None
) -> None:
    loaded = await loader.load(fresh_pins, defers=True)
    loaded.close()
    assert loaded.outcome.origin is Origin.COMPILED
    assert loaded.programs.keys() >= {*program_specs.DEFERRABLE}


async def test_compiler_is_never_mapped_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compile_cache.DIRECTORY_VARIABLE, raising=False)
    await compiling.compile_in_process(listeners.PROGRAM_SET, ())
    mapped = _mapped_files()
    assert "libbcc" not in mapped
    assert "LLVM" not in mapped


@pytest.mark.parametrize("spec", map_specs.MAPS, ids=lambda spec: spec.name)
async def test_pin_of_another_layout_is_an_error_and_stays(
    fresh_pins: pins.Pins, spec: map_specs.MapSpec
) -> None:
    fresh_pins.prepare()
    stranger = foreign.create_map(spec.key_size or 4, spec.value_size + 8, 16)
    syscalls.pin(stranger, fresh_pins.map(spec))
    with pytest.raises(errors.PinError, match=f"{spec.name} is not the map that this version uses"):
        await loader.load(fresh_pins)
    assert os.listdir(fresh_pins.maps) == [spec.name]
    assert os.listdir(fresh_pins.programs) == []
    os.close(stranger)


async def test_pin_that_is_no_map_is_an_error(fresh_pins: pins.Pins) -> None:
    fresh_pins.prepare()
    program = foreign.load_program(foreign.TC_ACT_OK)
    syscalls.pin(program, fresh_pins.map(map_specs.GATES))
    os.close(program)
    with pytest.raises(errors.PinError, match="is not the map that this version uses"):
        await loader.load(fresh_pins)


async def test_wrong_pin_is_found_also_when_programs_are_current(
    fresh_pins: pins.Pins, small_programs: None
) -> None:
    await load(fresh_pins)
    os.unlink(fresh_pins.map(map_specs.INJECTABLE))
    stranger = foreign.create_map(4, 8, 16)
    syscalls.pin(stranger, fresh_pins.map(map_specs.INJECTABLE))
    os.close(stranger)
    with pytest.raises(errors.PinError, match="injectable is not the map"):
        await loader.load(fresh_pins)


async def test_half_finished_load_is_not_used(fresh_pins: pins.Pins, small_programs: None) -> None:
    fresh_pins.prepare()
    unfinished = fresh_pins.programs / f"{sources.fingerprint()}-unfinished"
    unfinished.mkdir()
    program = foreign.load_program(foreign.TC_ACT_OK)
    syscalls.pin(program, str(unfinished / program_specs.GATE_EGRESS))
    origin, ids = await load(fresh_pins)
    assert origin is Origin.PREBUILT
    assert ids != [syscalls.program_id(program)]
    assert not unfinished.exists()
    os.close(program)


async def test_loads_of_a_killed_agent_and_the_next_do_not_disturb_each_other(
    fresh_pins: pins.Pins,
) -> None:
    fresh_pins.prepare()
    process = (sys.executable, "-c", versions.LOAD, str(fresh_pins.bpffs))
    orphans = [await asyncio.create_subprocess_exec(*process) for _ in range(2)]
    await load(fresh_pins)
    assert [await asyncio.wait_for(orphan.wait(), 60) for orphan in orphans] == [0, 0]
    assert os.listdir(fresh_pins.programs) == [sources.fingerprint()]
    assert (await load(fresh_pins))[0] is Origin.PINNED


async def test_half_removed_programs_are_made_again(
    fresh_pins: pins.Pins, small_programs: None
) -> None:
    await load(fresh_pins)
    os.unlink(fresh_pins.programs / sources.fingerprint() / program_specs.GATE_INGRESS)
    origin, _ = await load(fresh_pins)
    assert origin is Origin.PREBUILT


async def test_missing_map_is_one_sentence(fresh_pins: pins.Pins, small_programs: None) -> None:
    await load(fresh_pins)
    os.unlink(fresh_pins.map(map_specs.COUNTERS))
    with pytest.raises(errors.PinError, match=r"cannot open .*counters \(No such file"):
        await loader.load(fresh_pins)


async def test_directory_that_is_no_bpffs_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.PinError, match="is not a BPF file system") as caught:
        await loader.load(pins.Pins(tmp_path))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


async def test_compile_error_contains_the_compilers_line(
    fresh_pins: pins.Pins,
    nothing_prebuilt: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = versions.copy_of_sources(tmp_path)
    lines = source.read_text(encoding="ascii").count("\n")
    with source.open("a", encoding="ascii") as file:
        file.write("this is no C;\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.CompileError) as caught:
        await loader.load(fresh_pins)
    assert f"gate.c:{lines + 1}:1: error: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [name for name in os.listdir(fresh_pins.programs) if "unfinished" not in name] == []


async def test_failed_compile_leaves_the_previous_programs(
    fresh_pins: pins.Pins,
    small_programs: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, ids = await load(fresh_pins)
    source = versions.copy_of_sources(tmp_path)
    source.write_text("#error broken\n", encoding="ascii")
    with monkeypatch.context() as context:
        context.chdir(tmp_path)
        context.setattr(sources, "fingerprint", lambda: "0" * 16)
        with pytest.raises(errors.CompileError):
            await loader.load(fresh_pins)
    assert await load(fresh_pins) == (Origin.PINNED, ids)


async def test_old_programs_are_discarded_and_ours_are_kept(
    fresh_pins: pins.Pins, small_programs: None
) -> None:
    await load(fresh_pins)
    old = fresh_pins.programs / "old"
    old.mkdir()
    fresh_pins.discard_other_programs(sources.fingerprint())
    assert os.listdir(fresh_pins.programs) == [sources.fingerprint()]


async def test_everything_can_be_removed(fresh_pins: pins.Pins) -> None:
    await load(fresh_pins)
    expected = len(map_specs.MAPS) + len(accepted_programs())
    assert fresh_pins.remove_everything() == expected
    assert not fresh_pins.root.exists()
    assert fresh_pins.remove_everything() == 0

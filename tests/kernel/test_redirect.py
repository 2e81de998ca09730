"""Pins that a relay's process opens, writes and leaves, and its errors if one is missing."""

import ctypes
import ipaddress
import os
import pathlib
import struct
from collections.abc import Iterator

import pytest

from bpf import abi, errors, loader, map_specs, pins, program_specs, sources, syscalls
from bpf.redirect import Redirect
from tests.kernel import cgroups, foreign

pytestmark = pytest.mark.kernel

BPF_PROG_ATTACH, BPF_PROG_DETACH = 8, 9

POD, OTHER_POD = (ipaddress.ip_address(f"198.18.1.{number}") for number in (1, 2))
RELAY, SUCCESSOR = (ipaddress.ip_address(f"198.18.{64 + number}.16") for number in (0, 8))
POD6, RELAY6 = ipaddress.ip_address("fd00:18:0:1::1"), ipaddress.ip_address("fd00:18:64::10")
PAIR = 7


@pytest.fixture
def redirect(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Redirect]:
    with Redirect.open(installation, sources.fingerprint()) as made:
        yield made
        made.keep_only([])
    for key, _ in list(loaded.map(map_specs.RELAY_PODS).items()):
        loaded.map(map_specs.RELAY_PODS).delete(key)


def targets(loaded: loader.Loaded) -> dict[tuple[abi.IPAddress, int], abi.IPAddress]:
    found = {}
    for key, value in loaded.map(map_specs.RELAY_TARGETS).items():
        target = abi.CRelayTargetKey.from_buffer_copy(key)
        found[abi.unpack_address(bytes(target.pod)), target.port] = abi.unpack_address(value)
    return found


def origins(loaded: loader.Loaded) -> dict[abi.IPAddress, tuple[abi.IPAddress, int]]:
    found = {}
    for key, value in loaded.map(map_specs.RELAY_PODS).items():
        origin = abi.CRelayPod.from_buffer_copy(value)
        found[abi.unpack_address(key)] = abi.unpack_address(bytes(origin.pod)), origin.ifindex
    return found


def test_published_entries_exist_until_withdrawn_and_forgotten(
    redirect: Redirect, loaded: loader.Loaded
) -> None:
    redirect.publish(RELAY, POD, [0, 8080], PAIR)
    redirect.publish(RELAY6, POD6, [443], PAIR)
    assert targets(loaded) == {(POD, 0): RELAY, (POD, 8080): RELAY, (POD6, 443): RELAY6}
    assert origins(loaded) == {RELAY: (POD, PAIR), RELAY6: (POD6, PAIR)}
    redirect.withdraw(RELAY, POD, [0, 8080])
    assert targets(loaded) == {(POD6, 443): RELAY6}
    assert origins(loaded) == {RELAY: (POD, PAIR), RELAY6: (POD6, PAIR)}
    redirect.delete(RELAY)
    assert origins(loaded) == {RELAY6: (POD6, PAIR)}
    redirect.withdraw(RELAY, POD, [0, 8080])
    redirect.delete(RELAY)


def test_entries_of_the_successor_outlive_the_previous_relay(
    redirect: Redirect, loaded: loader.Loaded
) -> None:
    redirect.publish(RELAY, POD, [80, 8080], PAIR)
    redirect.publish(SUCCESSOR, POD, [80], PAIR + 1)
    redirect.withdraw(RELAY, POD, [80, 8080])
    redirect.delete(RELAY)
    assert targets(loaded) == {(POD, 80): SUCCESSOR}
    assert origins(loaded) == {SUCCESSOR: (POD, PAIR + 1)}


def test_entries_of_a_killed_relay_with_our_addresses_are_forgotten(
    redirect: Redirect, loaded: loader.Loaded
) -> None:
    redirect.publish(RELAY, POD, [0], PAIR)
    redirect.publish(SUCCESSOR, POD, [0], PAIR + 1)
    redirect.publish(RELAY6, POD6, [0], PAIR)
    ours = [ipaddress.ip_network(span) for span in ("198.18.64.0/21", "fd00:18:64::/67")]
    redirect.delete_within(ours)
    assert origins(loaded) == {SUCCESSOR: (POD, PAIR + 1)}


def test_keep_only_removes_other_targets_and_keeps_their_origins(
    redirect: Redirect, loaded: loader.Loaded
) -> None:
    redirect.publish(RELAY, POD, [0, 80], PAIR)
    redirect.publish(RELAY, OTHER_POD, [0], PAIR)
    redirect.keep_only({(POD, 80)})
    assert targets(loaded) == {(POD, 80): RELAY}
    assert RELAY in origins(loaded)


def test_address_of_another_family_is_one_sentence(redirect: Redirect) -> None:
    with pytest.raises(ValueError, match=r"^fd00:18:64::10 cannot represent 198.18.1.1: the fam"):
        redirect.publish(RELAY6, POD, [0], PAIR)


def test_nothing_pinned_is_one_sentence(fresh_pins: pins.Pins) -> None:
    with pytest.raises(errors.PinError, match=r"hold_syns \(No such file.*\); the agent pins"):
        Redirect.open(fresh_pins, sources.fingerprint())


@pytest.fixture
def copied_pins(loaded: loader.Loaded, fresh_pins: pins.Pins) -> pins.Pins:
    """The programs and maps of all, pinned a second time, to be tampered with."""
    fresh_pins.prepare()
    directory = fresh_pins.programs / sources.fingerprint()
    directory.mkdir()
    program = loaded.programs[program_specs.HOLD_SYNS]
    for name in (program_specs.HOLD_SYNS, *(hook.name for hook in program_specs.RELAY_HOOKS)):
        syscalls.pin(program, str(directory / name))
    for spec in (map_specs.RELAY_TARGETS, map_specs.RELAY_PODS, map_specs.RELAY_BEAT):
        syscalls.pin(loaded.map(spec).fd, fresh_pins.map(spec))
    return fresh_pins


@pytest.mark.parametrize("hook", program_specs.RELAY_HOOKS, ids=lambda hook: hook.name)
def test_program_that_the_kernel_rejected_is_one_sentence(
    copied_pins: pins.Pins, hook: program_specs.HookSpec
) -> None:
    Redirect.open(copied_pins, sources.fingerprint()).close()
    os.unlink(copied_pins.programs / sources.fingerprint() / hook.name)
    with pytest.raises(errors.PinError, match=f"kernel does not accept the program {hook.name}, "):
        Redirect.open(copied_pins, sources.fingerprint())


@pytest.mark.parametrize(
    "spec", [map_specs.RELAY_TARGETS, map_specs.RELAY_PODS, map_specs.RELAY_BEAT]
)
def test_map_of_another_layout_is_an_error(copied_pins: pins.Pins, spec: map_specs.MapSpec) -> None:
    os.unlink(copied_pins.map(spec))
    stranger = foreign.create_map(spec.key_size, spec.value_size + 8, 16)
    syscalls.pin(stranger, copied_pins.map(spec))
    os.close(stranger)
    with pytest.raises(errors.PinError, match=f"{spec.name} is not the map that this version uses"):
        Redirect.open(copied_pins, sources.fingerprint())


def test_no_descriptor_is_left(loaded: loader.Loaded, installation: pins.Pins) -> None:
    before = os.listdir("/proc/self/fd")
    with cgroups.cgroup() as own, Redirect.open(installation, sources.fingerprint()) as redirect:
        redirect.engage(own.directory)
        redirect.engage(own.directory)
    assert os.listdir("/proc/self/fd") == before


def test_directory_that_is_no_cgroup_is_an_error(redirect: Redirect) -> None:
    with pytest.raises(errors.BpfError, match="attaching to the root cgroup: "):
        redirect.engage(pathlib.Path("/proc"))


def test_program_that_excludes_a_hook_is_named_and_nothing_stays_attached(
    redirect: Redirect, loaded: loader.Loaded
) -> None:
    """In a cgroup of the test's own, as at the root."""
    hook = program_specs.RELAY_HOOKS[-1]
    (theirs,) = (known for known in program_specs.HOOKS if known.attach_type == hook.attach_type)
    program = loaded.programs[theirs.name]
    with cgroups.cgroup() as own:
        directory = os.open(own.directory, os.O_RDONLY)
        exclusively = struct.pack("=IIII", directory, program, hook.attach_type, 0)
        try:
            syscalls.call(_command(BPF_PROG_ATTACH), exclusively, what="attaching")
            with pytest.raises(errors.BpfError, match="without BPF_F_ALLOW_MULTI") as caught:
                redirect.engage(own.directory)
            assert f"program {syscalls.program_id(program)} is attached" in str(caught.value)
            first = program_specs.RELAY_HOOKS[0].attach_type
            assert syscalls.query_cgroup_programs(directory, first)[0] == []
            syscalls.call(_command(BPF_PROG_DETACH), exclusively, what="detaching")
            redirect.engage(own.directory)
            assert len(syscalls.query_cgroup_programs(directory, first)[0]) == 1
        finally:
            os.close(directory)
            redirect.disengage()


def _command(number: int) -> syscalls.Command:
    return ctypes.c_uint(number).value  # type: ignore[return-value]

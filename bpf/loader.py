"""The gates' programs and maps, opened from their pins, and loaded first if outdated."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Collection

from bpf import (
    btf,
    features,
    kernel_layouts,
    map_specs,
    maps,
    pinning,
    pins,
    program_specs,
    sources,
    syscalls,
)
from bpf.pinning import Origin, Outcome
from bpf.program_sets import ProgramSet, ProgramSpec

_SCHED_CLS = 3  # `enum bpf_prog_type`

PROGRAM_SET = ProgramSet(
    source="programs.c",
    programs=(
        *(
            ProgramSpec(name, function, _SCHED_CLS)
            for name, function in program_specs.PROGRAMS.items()
        ),
        *(ProgramSpec.hook(hook, is_optional=True) for hook in program_specs.OPTIONAL_PROGRAMS),
    ),
    maps=map_specs.MAPS,
    needs="Linux 5.10 with BPF and its JIT, and CAP_BPF",
    features=(features.KERNEL_READ, features.COARSE_CLOCK, features.CURRENT_TASK),
)

MOVING_COPIES = dataclasses.replace(
    PROGRAM_SET,
    programs=tuple(
        ProgramSpec(name, function, _SCHED_CLS)
        for name, function in program_specs.MOVING_COPIES.items()
    ),
)


@dataclasses.dataclass(slots=True)
class Loaded:
    """Open descriptors of all programs and maps. outcome: where the programs came from.

    programs: by name; of `program_specs`, HOOKS and TRACING_PROGRAMS only where the kernel accepts
    them, moving copies and DEFERRABLE once they are loaded.
    """

    programs: dict[str, int]
    open_maps: dict[str, maps.Map]
    outcome: Outcome

    def close(self) -> None:
        """Close the descriptors; the pins stay."""
        for fd in self.programs.values():
            os.close(fd)
        for opened in self.open_maps.values():
            opened.close()

    def map(self, spec: map_specs.MapSpec) -> maps.Map:
        return self.open_maps[spec.name]

    def copies(self, program: str) -> list[int]:
        """Descriptors of a program, and of its moving copy if that is loaded."""
        names = (program, program_specs.moving_copy(program))
        return [self.programs[name] for name in names if name in self.programs]


async def ensure_pinned(installation: pins.Pins, *, defers: bool = False) -> Outcome:
    """Ensure that the current programs are pinned. defers: without the deferrable ones, where
    nothing has to be compiled.

    Loads only if no programs with the sources' hash are pinned, and compiles only if the image has
    no compiled programs for this kernel. Raises `PinError` (no bpffs, or a pin of another program
    or layout) or `CompileError`; then the previous pins stay, and their gates continue to enforce.
    """
    installation.prepare()
    maps.check_pinned(installation)
    directory = installation.programs / sources.fingerprint()
    outcome = await pinning.ensure_pinned(
        PROGRAM_SET,
        directory,
        installation.maps,
        deferrable=program_specs.DEFERRABLE,
        defers=defers,
    )
    if not defers:
        await pinning.add(PROGRAM_SET.only(program_specs.DEFERRABLE), directory, installation.maps)
    return outcome


async def load(
    installation: pins.Pins, before: Outcome | None = None, *, defers: bool = False
) -> Loaded:
    """As `ensure_pinned`, and open the pins. before: of the call that may have pinned them."""
    outcome = await ensure_pinned(installation, defers=defers)
    if before is not None and outcome.origin is Origin.PINNED:
        outcome = before
    with contextlib.ExitStack() as undo:
        loaded = _open(installation, outcome)
        undo.callback(loaded.close)
        with contextlib.suppress(btf.BtfError):  # then gates find a pending checksum by trimming
            await asyncio.to_thread(
                kernel_layouts.write_buffer, loaded.map(map_specs.BUFFER_LAYOUT)
            )
        with contextlib.suppress(btf.BtfError):  # then hairpins pass
            await asyncio.to_thread(
                kernel_layouts.write_connect, loaded.map(map_specs.CONNECT_LAYOUT)
            )
        undo.pop_all()
    return loaded


async def load_deferred(
    installation: pins.Pins, loaded: Loaded, names: Collection[str] = program_specs.DEFERRABLE
) -> None:
    """Ensure that these of `program_specs.DEFERRABLE` are pinned, and open them. Raises `PinError`,
    `CompileError` or `BpfError`."""
    missing = [name for name in names if name not in loaded.programs]
    if not missing:
        return
    directory = installation.programs / sources.fingerprint()
    await pinning.add(PROGRAM_SET.only(missing), directory, installation.maps)
    for name in missing:
        if name not in loaded.programs:  # by another call meanwhile
            loaded.programs[name] = syscalls.open_pin(str(directory / name))


def open_maps(installation: pins.Pins) -> Loaded:
    """Open the pinned maps without programs, to read what works without the agent.

    Creates and changes nothing. Raises `PinError`: a map is missing, or of another layout.
    """
    with contextlib.ExitStack() as undo:
        opened = {}
        for spec in map_specs.MAPS:
            opened[spec.name] = maps.Map.open(installation.map(spec), spec)
            undo.callback(opened[spec.name].close)
        undo.pop_all()
    return Loaded({}, opened, Outcome(Origin.PINNED))


async def load_moving_copies(installation: pins.Pins, loaded: Loaded) -> None:
    """Ensure that the gates' moving copies are pinned, and open them.

    The verifier takes as long for them as for the gates, so they are loaded when a gate moves for
    the first time. Raises `PinError` or `CompileError`.
    """
    if loaded.programs.keys() >= program_specs.MOVING_COPIES.keys():
        return
    directory = installation.moving_copies(sources.fingerprint())
    await pinning.ensure_pinned(MOVING_COPIES, directory, installation.maps)
    for name in program_specs.MOVING_COPIES:
        loaded.programs[name] = syscalls.open_pin(str(directory / name))


def _open(installation: pins.Pins, outcome: Outcome) -> Loaded:
    directory = installation.programs / sources.fingerprint()
    with contextlib.ExitStack() as undo:
        found = open_maps(installation)
        undo.callback(found.close)
        programs = {}
        optional = [
            *program_specs.DEFERRABLE,
            *(hook.name for hook in (*program_specs.HOOKS, *program_specs.TRACING_PROGRAMS)),
        ]
        names = [name for name in program_specs.PROGRAMS if name not in program_specs.DEFERRABLE]
        names += [name for name in optional if os.path.lexists(directory / name)]
        paths = [directory / name for name in names]
        copies = installation.moving_copies(directory.name)
        if os.path.lexists(copies):  # a gate may run one since the previous agent
            paths += [copies / name for name in program_specs.MOVING_COPIES]
        for path in paths:
            programs[path.name] = syscalls.open_pin(str(path))
            undo.callback(os.close, programs[path.name])
        undo.pop_all()
    return Loaded(programs, found.open_maps, outcome)

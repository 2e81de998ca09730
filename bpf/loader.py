"""The gates' programs and maps, opened from their pins, and compiled first if outdated."""

import contextlib
import dataclasses
import os
import time

from bpf import abi, compiling, maps, pins, sources, syscalls


@dataclasses.dataclass(slots=True)
class Loaded:
    """Open descriptors of all programs and maps. was_compiled: the pins were outdated or missing.

    programs: by name; those of `abi.HOOKS` only where the kernel accepts them.
    """

    programs: dict[str, int]
    open_maps: dict[str, maps.Map]
    was_compiled: bool
    load_ms: float

    def close(self) -> None:
        """Close the descriptors; the pins stay."""
        for fd in self.programs.values():
            os.close(fd)
        for opened in self.open_maps.values():
            opened.close()

    def map(self, spec: abi.MapSpec) -> maps.Map:
        return self.open_maps[spec.name]

    def copies(self, program: str) -> tuple[int, int]:
        """Descriptors of a program and of its moving copy; the same if it has none."""
        own = self.programs[program]
        return own, self.programs.get(abi.moving_copy(program), own)


async def load(installation: pins.Pins) -> Loaded:
    """Ensure that the current programs are pinned, and open them.

    Compiles only if no programs with the sources' hash are pinned. Raises `PinError` (no bpffs, or
    a pin of another program or layout) or `CompileError`; then the previous pins stay, and their
    gates continue to enforce.
    """
    started = time.perf_counter()
    installation.prepare()
    maps.check_pinned(installation)
    was_compiled = await compiling.ensure_pinned(
        *(installation.programs / sources.fingerprint(), abi.PROGRAMS),
        *("bpf.compiler", str(installation.bpffs)),
        what="the eBPF programs",
    )
    loaded = _open(installation, was_compiled)
    loaded.load_ms = (time.perf_counter() - started) * 1000
    return loaded


def _open(installation: pins.Pins, was_compiled: bool) -> Loaded:
    directory = installation.programs / sources.fingerprint()
    with contextlib.ExitStack() as undo:
        opened = {}
        for spec in abi.MAPS:
            opened[spec.name] = maps.Map.open(installation.map(spec), spec)
            undo.callback(opened[spec.name].close)
        programs = {}
        hooks = [hook.name for hook in abi.HOOKS if os.path.lexists(directory / hook.name)]
        for name in (*abi.PROGRAMS, *hooks):
            programs[name] = syscalls.open_pin(str(directory / name))
            undo.callback(os.close, programs[name])
        undo.pop_all()
    return Loaded(programs, opened, was_compiled, load_ms=0.0)

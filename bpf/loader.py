"""The programs and maps, from the pins where those are current, else compiled first."""

import contextlib
import dataclasses
import os
import time

from bpf import abi, compiling, maps, pins, sources, syscalls


@dataclasses.dataclass(slots=True)
class Loaded:
    """Open descriptors of all programs and maps. `was_compiled`: the pins were not current.

    programs: by name; those of `abi.HOOKS` only where the kernel takes them.
    """

    programs: dict[str, int]
    open_maps: dict[str, maps.Map]
    was_compiled: bool
    load_ms: float

    def close(self) -> None:
        """Close the descriptors; what is pinned stays."""
        for fd in self.programs.values():
            os.close(fd)
        for opened in self.open_maps.values():
            opened.close()

    def map(self, spec: abi.MapSpec) -> maps.Map:
        return self.open_maps[spec.name]

    def copies(self, program: str) -> tuple[int, int]:
        """A program's descriptor, and that of its spare; the same where it has none."""
        own = self.programs[program]
        return own, self.programs.get(abi.moving_copy(program), own)


async def load(installation: pins.Pins) -> Loaded:
    """Make sure that the current programs are pinned, and open them.

    Nothing is compiled when programs with the source's hash are pinned already. Raises `PinError`
    (no bpffs, a foreign or other-layout pin) or `CompileError`; then whatever was pinned before
    still is, and goes on judging.
    """
    started = time.perf_counter()
    installation.prepare()
    directory = installation.programs / sources.fingerprint()
    was_compiled = not compiling.are_pinned(directory, abi.PROGRAMS)
    if was_compiled:
        maps.check_pinned(installation)
        what = "the eBPF programs"
        await compiling.run("bpf.compiler", str(installation.bpffs), what=what)
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

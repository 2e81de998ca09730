"""The programs and maps, from the pins where those are current, else compiled first."""

import asyncio
import contextlib
import dataclasses
import os
import sys
import time

from bpf import abi, errors, maps, pins, sources, syscalls

# A compile takes 0.2 s on an idle machine; a minute means that something is badly wrong.
_COMPILE_TIMEOUT_SECONDS = 60


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
        """A program's descriptor, and that of its spare."""
        return self.programs[program], self.programs[abi.spare(program)]


async def load(installation: pins.Pins) -> Loaded:
    """Make sure that the current programs are pinned, and open them.

    Nothing is compiled when programs with the source's hash are pinned already. Raises `PinError`
    (no bpffs, a foreign or other-layout pin) or `CompileError`; then whatever was pinned before
    still is, and goes on judging.
    """
    started = time.perf_counter()
    installation.prepare()
    was_compiled = not _is_pinned(installation)
    if was_compiled:
        maps.check_pinned(installation)
        await _compile(installation)
    loaded = _open(installation, was_compiled)
    loaded.load_ms = (time.perf_counter() - started) * 1000
    return loaded


def _is_pinned(installation: pins.Pins) -> bool:
    """Whether every program of this source is there: somebody may have removed one by hand."""
    directory = installation.programs / sources.fingerprint()
    return all(os.path.lexists(directory / name) for name in abi.PROGRAMS)


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


async def _compile(installation: pins.Pins) -> None:
    """Run `bpf.compiler` in a process of its own (vfork and exec, so safe beside threads)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bpf.compiler",
        str(installation.bpffs),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMPILE_TIMEOUT_SECONDS):
            _, messages = await process.communicate()
    except TimeoutError:
        raise errors.CompileError(
            f"compiling the eBPF programs took more than {_COMPILE_TIMEOUT_SECONDS} s; "
            "see whether the node is out of CPU or memory"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = messages.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else _unsaid(process.returncode)
        first_error = next((line for line in lines[:-1] if "error:" in line), None)
        raise errors.CompileError(f"{reason} ({first_error})" if first_error else reason)


def _unsaid(status: int | None) -> str:
    """Why the compiler ended without a word: somebody ended it."""
    if status is not None and status < 0:
        return (
            f"the compiler was ended by signal {-status}; it needs 250 MB of memory for a second, "
            "so raise the memory limit"
        )
    return f"the compiler ended with status {status}"

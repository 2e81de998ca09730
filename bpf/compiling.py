"""Compile processes: bcc compiles a program set, and its instructions come back as an artefact.

bcc maps 250 MB of LLVM, so only short-lived processes import it; the agent never does. bcc creates
the maps of the sources while it compiles, which takes CAP_BPF; they are discarded with the process.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

from bpf import artefacts, errors, features, map_specs, sources
from bpf.artefacts import Artefact, Function
from bpf.features import Feature
from bpf.program_sets import ProgramSet

# A compile takes seconds on an idle machine, and over a minute beside ten busy processes for each
# processor; five minutes mean that something is badly wrong.
_TIMEOUT_SECONDS = 300

# PAGE_SIZE: sizes a ring that the loader creates itself.
FLAGS = ("-Wall", "-Werror", "-DPAGE_SIZE=4096")


async def compile_in_process(programs: ProgramSet, used: Collection[Feature]) -> Artefact:
    """Run `python -m bpf.compiler` (by vfork and exec, which is safe with threads).

    Raises `CompileError` with the last line that the process wrote to stderr.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bpf.compiler", programs.source),
        *(feature.macro for feature in used),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            content, messages = await process.communicate()
    except TimeoutError:
        raise errors.CompileError(
            f"compiling {programs.source} took more than {_TIMEOUT_SECONDS} s; "
            "check whether the node is out of CPU or memory"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = messages.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else _status_text(process.returncode)
        first_error = next((line for line in lines[:-1] if "error:" in line), None)
        raise errors.CompileError(f"{reason} ({first_error})" if first_error else reason)
    try:
        return artefacts.decode(content, programs)
    except artefacts.ArtefactError as error:
        raise errors.CompileError(f"the output of bpf.compiler cannot be used: {error}") from error


def compile_here(programs: ProgramSet, used: Collection[Feature]) -> Artefact:
    """Compile in this process. Raises `CompileError`; the compiler's messages are on stderr."""
    bcc = import_bcc()
    flags = [*FLAGS, *features.compiler_flags(programs.features, used)]
    try:
        module = bcc.BPF(text=sources.expand(programs.source), cflags=flags)
    except Exception as error:  # bcc raises plain Exception for every failure
        raise errors.CompileError(f"{programs.source} could not be compiled: {error}") from error
    names = {_descriptor(bcc.lib, module.module, spec): spec.name for spec in programs.maps}
    functions = {}
    for function in sorted({program.function for program in programs.programs}):
        try:
            functions[function] = Function.extract(module.dump_func(function.encode()), names)
        except KeyError:
            raise errors.CompileError(
                f"{function} uses a map that bpf/map_specs.py does not list; add its MapSpec"
            ) from None
    macros = tuple(feature.macro for feature in used)
    return Artefact(programs.source, sources.fingerprint(), macros, functions)


def _descriptor(libbcc: Any, module: int, spec: map_specs.MapSpec) -> int:
    """The descriptor in the instructions. Raises `CompileError` unless the C side has this map."""
    sizes = libbcc.bpf_table_key_size_id, libbcc.bpf_table_leaf_size_id
    for size in sizes:
        size.argtypes, size.restype = [ctypes.c_void_p, ctypes.c_ulonglong], ctypes.c_size_t
    number = libbcc.bpf_table_id(module, spec.name.encode())
    shape = (
        libbcc.bpf_table_type_id(module, number),
        # A ring has neither keys nor values; bcc sees the types of its records.
        *((size(module, number) for size in sizes) if spec.key_size else (0, 0)),
        libbcc.bpf_table_max_entries_id(module, number),
        libbcc.bpf_table_flags_id(module, number),
    )
    if shape != (spec.type, spec.key_size, spec.value_size, spec.max_entries, spec.flags):
        raise errors.CompileError(
            f"the map {spec.name} of the C sources is not its MapSpec: type, sizes, number of "
            f"entries and flags are {shape}"
        )
    return int(libbcc.bpf_table_fd(module, spec.name.encode()))


def import_bcc() -> ModuleType:
    """bcc, set up for the stand-in headers. Raises `CompileError` when it is not installed."""
    os.environ["BCC_KERNEL_SOURCE"] = str(sources.KERNEL_SOURCE)
    try:
        import bcc
    except ImportError as error:
        raise errors.CompileError(
            "bcc is not installed for this Python; install the distribution's python3-bpfcc and "
            "use a virtual environment made with --system-site-packages"
        ) from error
    module: ModuleType = bcc
    return module


def _status_text(status: int | None) -> str:
    """Why the compiler ended without a message: by a signal, usually for lack of memory."""
    if status is not None and status < 0:
        return (
            f"the compiler was killed by signal {-status}; it needs 250 MB of memory for a second, "
            "so raise the memory limit"
        )
    return f"the compiler ended with status {status}"

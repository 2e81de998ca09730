"""`python -m bpf.compiler BPFFS`: compile, load and pin, then end.

bcc maps 250 MB of LLVM, so only this short-lived process imports it. On success it prints one JSON
object: {"compile_load_ms"}. On failure it prints one sentence to stderr, after the compiler's own
messages, and exits with 1.
"""

import json
import os
import shutil
import sys
import time
from types import ModuleType
from typing import Any

from bpf import abi, errors, maps, pins, sources, syscalls


def compile_and_pin(installation: pins.Pins) -> None:
    """Compile every program, load it, and pin programs and maps.

    Maps that are pinned already are reused; one of another layout is a `PinError` before anything
    is loaded. Raises `CompileError` when the compiler or the verifier refuses.
    """
    maps.check_pinned(installation)

    os.environ["BCC_KERNEL_SOURCE"] = str(sources.KERNEL_SOURCE)
    try:
        import bcc
    except ImportError as error:
        raise errors.CompileError(
            "bcc is not installed for this Python; install the distribution's python3-bpfcc and "
            "use a virtual environment made with --system-site-packages"
        ) from error

    fingerprint = sources.fingerprint()
    final = installation.programs / fingerprint
    unfinished = installation.programs / f"{fingerprint}-unfinished"
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(mode=0o700)
    _make_reply_template(installation)
    flags = ["-Wall", "-Werror", f'-DPIN_DIR="{installation.maps}"']
    try:
        functions = _load(bcc, flags)
        for name, function in functions.items():
            syscalls.pin(function.fd, str(unfinished / name))
    except Exception as error:  # bcc raises plain Exception for all that fails
        raise errors.CompileError(
            f"the eBPF programs could not be compiled or loaded: {error}; "
            "the kernel must be 5.10 or newer with BPF and its JIT, and podgate needs CAP_BPF"
        ) from error
    for spec in abi.MAPS:
        maps.Map.open(installation.map(spec), spec).close()
    if final.exists():  # it lacks a program, or nothing would have been compiled
        shutil.rmtree(final)
    os.rename(unfinished, final)


def _make_reply_template(installation: pins.Pins) -> None:
    """Pin the template of pods' reply tables, unless it is there: bcc takes what is pinned.

    bcc's own would carry BTF, which the tables that `Gates` makes do not. From Linux 5.15 up to 6.1
    the kernel takes that for a timer in one and none in the other, and refuses the tables (EINVAL;
    mended in 6.2, db559117828d).
    """
    spec = abi.REPLY_TABLE
    path = installation.map(spec)
    if os.path.lexists(path):
        return
    table = syscalls.map_create(spec.type, spec.key_size, spec.value_size, spec.max_entries)
    try:
        syscalls.pin(table, path)
    finally:
        os.close(table)


def _load(bcc: ModuleType, flags: list[str]) -> dict[str, Any]:
    """bcc's functions by name. Raises what bcc raises: plain Exception."""
    try:
        return _load_with(bcc, [*flags, "-DCURRENT_TASK"])
    except Exception:
        # Before Linux 6.10 tc programs may not ask for the current task (its name and cgroup).
        return _load_with(bcc, flags)


def _load_with(bcc: ModuleType, flags: list[str]) -> dict[str, Any]:
    module = bcc.BPF(text=sources.expand("gate.c"), cflags=flags)
    loaded = {}
    for name, function in abi.PROGRAMS.items():
        module.funcs.pop(function.encode(), None)  # or bcc gives the same copy again
        loaded[name] = module.load_func(function.encode(), bcc.BPF.SCHED_CLS)
    return loaded


def main() -> int:
    started = time.perf_counter()
    try:
        compile_and_pin(pins.Pins(sys.argv[1]))
    except (errors.CompileError, errors.PinError, errors.BpfError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    elapsed_ms = (time.perf_counter() - started) * 1000
    sys.stdout.write(json.dumps({"compile_load_ms": round(elapsed_ms, 1)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bpf.compiler BPFFS`: compile, load and pin the programs of gates and hooks."""

import os
import pathlib
import sys
from types import ModuleType
from typing import Any

from bpf import abi, compiling, errors, features, maps, pins, sources, syscalls


def compile_and_pin(installation: pins.Pins) -> None:
    """Compile every program, load it, and pin programs and maps.

    Maps that are pinned already are reused; one of another layout is a `PinError` before anything
    is loaded. Raises `CompileError` when the compiler or the verifier refuses.
    """
    maps.check_pinned(installation)

    bcc = compiling.import_bcc()
    with compiling.pinning(
        installation.programs / sources.fingerprint(), abi.PROGRAMS
    ) as unfinished:
        if unfinished is None:
            return
        _make_reply_template(installation)
        flags = [f'-DPIN_DIR="{installation.maps}"', *features.compiler_flags()]
        try:
            _load(bcc, ["-Wall", "-Werror", *flags], unfinished)
        except Exception as error:  # bcc raises plain Exception for all that fails
            raise errors.CompileError(
                f"the eBPF programs could not be compiled or loaded: {error}; "
                "the kernel must be 5.10 or newer with BPF and its JIT, and podgate needs CAP_BPF"
            ) from error
        for spec in abi.MAPS:
            maps.Map.open(installation.map(spec), spec).close()


def _load(bcc: ModuleType, flags: list[str], directory: pathlib.Path) -> None:
    """Pin all programs in `directory`. Raises what bcc raises."""
    module = bcc.BPF(text=sources.expand("programs.c"), cflags=flags)
    for name, function in abi.PROGRAMS.items():
        module.funcs.pop(function.encode(), None)  # or bcc gives the same copy again
        loaded = module.load_func(function.encode(), bcc.BPF.SCHED_CLS)
        syscalls.pin(loaded.fd, str(directory / name))
    for hook in (*abi.HOOKS, *abi.RELAY_HOOKS):
        if (fd := _load_hook(module, hook)) is not None:
            syscalls.pin(fd, str(directory / hook.name))


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


def _load_hook(module: Any, hook: abi.HookSpec) -> int | None:
    """A hook's descriptor; None where the kernel refuses it: before Linux 5.15 setsockopt programs
    may not ask for the namespace's cookie (6cf1770d63dd).
    """
    try:
        loaded = module.load_func(hook.name.encode(), hook.type, attach_type=hook.attach_type)
    except Exception:  # what bcc raises
        return None
    return int(loaded.fd)


if __name__ == "__main__":
    sys.exit(compiling.main(lambda bpffs: compile_and_pin(pins.Pins(bpffs))))

"""`python -m bpf.compiler BPFFS`: compile, load and pin the programs of gates and hooks."""

import os
import sys
from types import ModuleType
from typing import Any

from bpf import abi, compiling, features, maps, pins, sources, syscalls


def compile_and_pin(installation: pins.Pins) -> None:
    """Compile every program, load it, and pin programs and maps.

    Pinned maps are reused. Raises `PinError` before anything is loaded if one has another layout,
    and `CompileError` if the compiler or the verifier fails.
    """
    maps.check_pinned(installation)

    def load(bcc: ModuleType) -> tuple[Any, dict[str, int]]:
        _make_reply_template(installation)
        flags = [f'-DPIN_DIR="{installation.maps}"', *features.compiler_flags()]
        loaded = _load(bcc, ["-Wall", "-Werror", *flags])
        for spec in abi.MAPS:
            maps.Map.open(installation.map(spec), spec).close()
        return loaded

    compiling.compile_and_pin(
        installation.programs / sources.fingerprint(),
        abi.PROGRAMS,
        load,
        what="the eBPF programs",
        needs="Linux 5.10 with BPF and its JIT, and CAP_BPF",
    )


def _load(bcc: ModuleType, flags: list[str]) -> tuple[Any, dict[str, int]]:
    """The module, which owns the descriptors, and the programs by name. Raises bcc's errors."""
    module = bcc.BPF(text=sources.expand("programs.c"), cflags=flags)
    loaded = {}
    for name, function in abi.PROGRAMS.items():
        # Otherwise bcc returns the same copy again.
        module.funcs.pop(function.encode(), None)
        loaded[name] = module.load_func(function.encode(), bcc.BPF.SCHED_CLS).fd
    for hook in (*abi.HOOKS, *abi.RELAY_HOOKS):
        if (fd := _load_hook(module, hook)) is not None:
            loaded[hook.name] = fd
    return module, loaded


def _make_reply_template(installation: pins.Pins) -> None:
    """Pin the template of the pods' reply tables, unless it is pinned: bcc uses what is pinned.

    bcc's own would have BTF, which the tables that `Gates` creates lack. From Linux 5.15 up to 6.1
    the kernel sees a timer in one and none in the other, and rejects the tables (EINVAL; fixed in
    6.2, db559117828d).
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
    """A hook's descriptor. None where the kernel rejects it: before Linux 5.15 setsockopt programs
    may not read the namespace's cookie (6cf1770d63dd).
    """
    try:
        loaded = module.load_func(hook.name.encode(), hook.type, attach_type=hook.attach_type)
    except Exception:  # what bcc raises
        return None
    return int(loaded.fd)


if __name__ == "__main__":
    sys.exit(compiling.main(lambda bpffs: compile_and_pin(pins.Pins(bpffs))))

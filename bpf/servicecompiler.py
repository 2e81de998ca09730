"""`python -m bpf.servicecompiler DIRECTORY`: compile, load and pin `services.c`.

Apart from the gate: without a proxy nobody waits for it.
"""

import contextlib
import pathlib
import sys
from types import ModuleType
from typing import Any

from bpf import compiling, errors, services, sources, syscalls

# Linux 5.18 (b44123b4a3dc): who is refused hears why. Earlier ones refuse the program.
_VARIANTS: tuple[list[str], ...] = (["-DHAS_SET_RETVAL"], [])


def compile_and_pin(directory: pathlib.Path) -> None:
    """Pin the programs and their maps in `directory`, which appears only when all are there.

    Raises `CompileError` when the compiler or the verifier refuses.
    """
    bcc = compiling.import_bcc()
    with compiling.pinning(directory, services.PINS) as unfinished:
        if unfinished is None:
            return
        try:
            module, loaded = _load(bcc)
            for name, fd in loaded.items():
                syscalls.pin(fd, str(unfinished / name))
            for spec in services.MAPS:
                syscalls.pin(module[spec.name].map_fd, str(unfinished / spec.name))
        except Exception as error:  # bcc raises plain Exception for all that fails
            raise errors.CompileError(
                f"the proxy's programs could not be compiled or loaded: {error}; "
                "it needs Linux 5.10"
            ) from error


def _load(bcc: ModuleType) -> tuple[Any, dict[str, int]]:
    """The module and its programs' descriptors, of the first variant that the kernel takes."""
    *better, last = _VARIANTS
    for flags in better:
        with contextlib.suppress(Exception):  # bcc raises plain Exception for all that fails
            return _load_variant(bcc, flags)
    return _load_variant(bcc, last)


def _load_variant(bcc: ModuleType, flags: list[str]) -> tuple[Any, dict[str, int]]:
    module = bcc.BPF(text=sources.expand("services.c"), cflags=["-Wall", "-Werror", *flags])
    loaded = {}
    for hook in services.HOOKS:
        function = module.load_func(hook.name.encode(), hook.type, attach_type=hook.attach_type)
        loaded[hook.name] = function.fd
    return module, loaded


if __name__ == "__main__":
    sys.exit(compiling.main(lambda directory: compile_and_pin(pathlib.Path(directory))))

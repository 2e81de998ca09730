"""`python -m bpf.servicecompiler DIRECTORY`: compile, load and pin `services.c`.

Apart from the gate: without a proxy nobody waits for it.
"""

import pathlib
import sys
from types import ModuleType

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
        for flags in _VARIANTS:
            try:
                _load(bcc, flags, unfinished)
            except Exception as error:  # bcc raises plain Exception for all that fails
                if flags is not _VARIANTS[-1]:
                    continue
                raise errors.CompileError(
                    f"the proxy's programs could not be compiled or loaded: {error}; "
                    "it needs Linux 5.10"
                ) from error
            return


def _load(bcc: ModuleType, flags: list[str], directory: pathlib.Path) -> None:
    module = bcc.BPF(text=sources.expand("services.c"), cflags=["-Wall", "-Werror", *flags])
    loaded = {
        hook.name: module.load_func(hook.name.encode(), hook.type, attach_type=hook.attach_type)
        for hook in services.HOOKS
    }
    for name, function in loaded.items():
        syscalls.pin(function.fd, str(directory / name))
    for spec in services.MAPS:
        syscalls.pin(module[spec.name].map_fd, str(directory / spec.name))


if __name__ == "__main__":
    sys.exit(compiling.main(lambda directory: compile_and_pin(pathlib.Path(directory))))

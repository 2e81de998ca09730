"""`python -m bpf.listenercompiler DIRECTORY`: compile, load and pin `listeners.c`.

Apart from the gate, because a kernel that refuses this program (before 5.15) can still have gates.
"""

import mmap
import pathlib
import sys

from bpf import compiling, errors, listeners, sources, syscalls


def compile_and_pin(directory: pathlib.Path) -> None:
    """Pin the program and its maps in `directory`, which appears only when all are there.

    Raises `CompileError` when the compiler or the verifier refuses.
    """
    bcc = compiling.import_bcc()
    with compiling.pinning(directory, listeners.PINS) as unfinished:
        if unfinished is None:
            return
        try:
            flags = ["-Wall", "-Werror", f"-DPAGE_SIZE={mmap.PAGESIZE}"]
            module = bcc.BPF(text=sources.expand("listeners.c"), cflags=flags)
            function = module.load_func(listeners.PROGRAM.encode(), bcc.BPF.SOCK_OPS)
            syscalls.pin(function.fd, str(unfinished / listeners.PROGRAM))
            for spec in listeners.MAPS:
                syscalls.pin(module[spec.name].map_fd, str(unfinished / spec.name))
        except Exception as error:  # bcc raises plain Exception for all that fails
            raise errors.CompileError(
                f"the listener events' program could not be compiled or loaded: {error}; "
                "it needs Linux 5.15"
            ) from error


if __name__ == "__main__":
    sys.exit(compiling.main(lambda directory: compile_and_pin(pathlib.Path(directory))))

"""`python -m bpf.listenercompiler DIRECTORY`: compile, load and pin `listeners.c`, then end.

Like bpf.compiler it is a process of its own, because bcc maps 250 MB of LLVM. Apart from the gate,
because a kernel that refuses this program (before 5.15) can still have gates.
"""

import mmap
import os
import pathlib
import sys

from bpf import errors, listeners, sources, syscalls


def compile_and_pin(directory: pathlib.Path) -> None:
    """Pin the program and its maps in `directory`, which appears only when all are there.

    Raises `CompileError` when the compiler or the verifier refuses.
    """
    os.environ["BCC_KERNEL_SOURCE"] = str(sources.KERNEL_SOURCE)
    try:
        import bcc
    except ImportError as error:
        raise errors.CompileError(
            "bcc is not installed for this Python; install the distribution's python3-bpfcc"
        ) from error
    unfinished = directory.with_name(f"{directory.name}-unfinished")
    if unfinished.exists():
        listeners.unpin(unfinished)
    unfinished.mkdir(mode=0o700, parents=True)
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
    os.rename(unfinished, directory)


def main() -> int:
    try:
        compile_and_pin(pathlib.Path(sys.argv[1]))
    except (errors.CompileError, errors.BpfError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

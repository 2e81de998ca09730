"""`python -m bpf.listener_compiler DIRECTORY`: compile, load and pin `listeners.c`.

Separate from the gate's compiler: a kernel that rejects this program (before 5.15) can have gates.
"""

import contextlib
import mmap
import pathlib
import sys
from types import ModuleType
from typing import Any

from bpf import compiling, listeners, sources

_TRACING = 26  # BPF_PROG_TYPE_TRACING


def compile_and_pin(directory: pathlib.Path) -> None:
    """As `compiling.compile_and_pin`: the program and its maps."""
    compiling.compile_and_pin(
        directory,
        listeners.PINS,
        _load,
        what="the listener events' program",
        needs="Linux 5.15",
    )


def _load(bcc: ModuleType) -> tuple[Any, dict[str, int]]:
    flags = ["-Wall", "-Werror", f"-DPAGE_SIZE={mmap.PAGESIZE}"]
    module = bcc.BPF(text=sources.expand("listeners.c"), cflags=flags)
    function = module.load_func(listeners.PROGRAM.encode(), bcc.BPF.SOCK_OPS)
    loaded = {listeners.PROGRAM: function.fd}
    with contextlib.suppress(Exception):  # what bcc raises
        iterator = module.load_func(listeners.ITERATOR.encode(), _TRACING)
        loaded[listeners.ITERATOR] = iterator.fd
    loaded |= {spec.name: module[spec.name].map_fd for spec in listeners.MAPS}
    return module, loaded


if __name__ == "__main__":
    sys.exit(compiling.main(lambda directory: compile_and_pin(pathlib.Path(directory))))

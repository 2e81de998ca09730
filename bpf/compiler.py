"""Compile program sets, as a process of its own: it maps 250 MB of LLVM.

python -m bpf.compiler SOURCE [FEATURE...]     one artefact on stdout
python -m bpf.compiler --all DIRECTORY         all artefacts of an image
"""

import os
import pathlib
import sys
from collections.abc import Collection

from bpf import (
    artefacts,
    compile_cache,
    compiling,
    errors,
    host_egress,
    listener_lookup,
    listeners,
    loader,
    memory_watch,
    packet_hooks,
)
from bpf.features import Feature
from bpf.program_sets import ProgramSet
from bpf.services import services

PROGRAM_SETS = (
    loader.PROGRAM_SET,
    listeners.PROGRAM_SET,
    listener_lookup.PROGRAM_SET,
    services.PROGRAM_SET,
    host_egress.PROGRAM_SET,
    memory_watch.PROGRAM_SET,
    packet_hooks.PROGRAM_SET,
)


def compile_all(directory: pathlib.Path) -> None:
    """Write an artefact of each program set for each set of features. Raises `CompileError`."""
    for programs in PROGRAM_SETS:
        for used in programs.feature_sets():
            content = compile_cache.artefact(programs, used, _compile)
            artefacts.path(directory, programs, used).write_bytes(content)


def _compile_one(source: str, macros: list[str]) -> bytes:
    (programs,) = (candidate for candidate in PROGRAM_SETS if candidate.source == source)
    used = [feature for feature in programs.features if feature.macro in macros]
    return compile_cache.artefact(programs, used, _compile)


def _compile(programs: ProgramSet, used: Collection[Feature]) -> bytes:
    return compiling.compile_here(programs, used).encode()


def main() -> int:
    """A failure is one sentence on stderr, after the compiler's messages."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # bcc's messages
        try:
            match sys.argv[1:]:
                case ["--all", directory]:
                    compile_all(pathlib.Path(directory))
                case [source, *macros]:
                    output.write(_compile_one(source, macros))
        except (errors.CompileError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

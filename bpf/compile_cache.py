"""What was compiled before, in a directory: tests and demos often compile the same sources.

Only where the environment names a directory, as the Makefile does. A file's name is a hash of all
that its content depends on: the sources, this package, the set of features, and the installed bcc.
"""

import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Collection

from bpf import artefacts, locks, sources
from bpf.features import Feature
from bpf.program_sets import ProgramSet

DIRECTORY_VARIABLE = "PODGATE_COMPILE_CACHE"
"""Environment variable that names the directory; none if it is empty or not set."""

# A set of programs is compiled in some seconds, on an emulated machine in minutes.
_LOCK_SECONDS = 600.0
_PACKAGE = pathlib.Path(__file__).parent


def artefact(
    programs: ProgramSet,
    used: Collection[Feature],
    compile_it: Callable[[ProgramSet, Collection[Feature]], bytes],
) -> bytes:
    """The encoded artefact; one process compiles it, and those that need the same meanwhile wait.

    Raises `OSError`, `BpfError` if the other process does not end, and what `compile_it` raises:
    then nothing is kept.
    """
    if not (directory := os.environ.get(DIRECTORY_VARIABLE)):
        return compile_it(programs, used)
    name = artefacts.path(pathlib.Path(directory, _key()), programs, used)
    name.parent.mkdir(parents=True, exist_ok=True)
    with name.with_suffix(".lock").open("w") as lock:
        locks.take(lock.fileno(), _LOCK_SECONDS)
        try:
            return name.read_bytes()
        except FileNotFoundError:
            content = compile_it(programs, used)
            unfinished = name.with_suffix(".unfinished")
            unfinished.write_bytes(content)
            unfinished.rename(name)
            return content


def _key() -> str:
    digest = hashlib.sha256(sources.fingerprint().encode())
    for path in sorted(_PACKAGE.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    if (bcc := importlib.util.find_spec("bcc")) and bcc.origin:
        digest.update(f"{os.stat(bcc.origin).st_mtime_ns}".encode())
    return digest.hexdigest()[:16]

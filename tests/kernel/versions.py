"""Another version of the programs: the same sources with a line more, compiled beside ours."""

import dataclasses
import pathlib
import shutil
import subprocess
import sys

import bpf
from bpf import abi, loader, pins, sources, syscalls


def copy_of_sources(directory: pathlib.Path) -> pathlib.Path:
    """A copy of the `bpf` package below `directory`; its src/gate.c."""
    ours = pathlib.Path(bpf.__file__).parent
    shutil.copytree(ours, directory / "bpf", ignore=shutil.ignore_patterns("__pycache__"))
    return directory / "bpf" / "src" / "gate.c"


def load_other(
    directory: pathlib.Path, installation: pins.Pins, loaded: loader.Loaded
) -> loader.Loaded:
    """Load a changed copy over the same maps. The caller closes only its programs."""
    with copy_of_sources(directory).open("a", encoding="ascii") as source:
        source.write("/* the next version */\n")
    subprocess.run(
        [sys.executable, "-m", "bpf.compiler", str(installation.bpffs)],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    known = sources.fingerprint()
    (made,) = (
        path
        for path in installation.programs.iterdir()
        if path.name != known and not path.name.endswith("-unfinished")
    )
    programs = {name: syscalls.open_pin(str(made / name)) for name in abi.PROGRAMS}
    shutil.rmtree(made)
    return dataclasses.replace(loaded, programs=programs)

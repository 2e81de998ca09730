"""Other versions of the programs, compiled from changed copies of the sources."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import bpf
from bpf import artefacts, features, listeners, loader, pins, program_specs, sources, syscalls

LOAD = """
import asyncio, sys
from bpf import loader, pins
asyncio.run(loader.load(pins.Pins(sys.argv[1])))
"""


def copy_of(package: ModuleType, directory: pathlib.Path) -> pathlib.Path:
    """A copy of a package below `directory`, with what Python has compiled of it already."""
    assert package.__file__ is not None
    ours = pathlib.Path(package.__file__).parent
    # Other processes write those files: each under another name first.
    return shutil.copytree(ours, directory / ours.name, ignore=shutil.ignore_patterns("*.pyc.*"))


def copy_of_sources(directory: pathlib.Path) -> pathlib.Path:
    """A copy of the `bpf` package below `directory`; its src/gate.c."""
    return copy_of(bpf, directory) / "src" / "gate.c"


@contextlib.contextmanager
def other_version(
    directory: pathlib.Path, installation: pins.Pins, loaded: loader.Loaded
) -> Iterator[loader.Loaded]:
    """A changed copy that is loaded over the same maps."""
    with copy_of_sources(directory).open("a", encoding="ascii") as source:
        source.write("/* the next version */\n")
    _copy_compiled(directory)
    _load(directory, installation)
    known = sources.fingerprint()
    (made,) = (
        path
        for path in installation.programs.iterdir()
        if path.name != known and not path.name.endswith(("-unfinished", pins.MOVING))
    )
    programs = {name: syscalls.open_pin(str(made / name)) for name in program_specs.PROGRAMS}
    shutil.rmtree(made)
    try:
        yield dataclasses.replace(loaded, programs=programs)
    finally:
        for descriptor in programs.values():
            os.close(descriptor)


def of_schema(directory: pathlib.Path, schema: int, *, gate_addresses: int | None = None) -> None:
    """A copy of the `bpf` package with another schema, for a process that starts in `directory`.

    gate_addresses: how many struct gate holds, which changes the layout of the gates map as well.
    """
    header = copy_of_sources(directory).with_name("abi.h")
    twin = directory / "bpf" / "abi.py"
    _substitute(twin, r"^SCHEMA = \d+$", f"SCHEMA = {schema}")
    if gate_addresses is not None:
        _substitute(twin, r"^GATE_ADDRESSES = \d+$", f"GATE_ADDRESSES = {gate_addresses}")
        _substitute(header, r"^(#define GATE_ADDRESSES) \d+$", rf"\1 {gate_addresses}")


def compile_programs(directory: pathlib.Path) -> None:
    """Compile the agent's programs of a changed copy below `directory`, where `compiled` is."""
    compiled(directory).mkdir()
    for programs in (loader.PROGRAM_SET, listeners.PROGRAM_SET):
        used = features.offered(programs.features)
        with artefacts.path(compiled(directory), programs, used).open("wb") as output:
            subprocess.run(
                [sys.executable, "-m", "bpf.compiler", programs.source]
                + [feature.macro for feature in used],
                cwd=directory,
                check=True,
                stdout=output,
            )


def compiled(directory: pathlib.Path) -> pathlib.Path:
    """Where programs of a copy are, for `artefacts.DIRECTORY_VARIABLE`."""
    return directory / "bpf" / "compiled"


def load_as(directory: pathlib.Path, installation: pins.Pins) -> loader.Loaded:
    """Our own programs and layouts, loaded under the directory of another schema."""
    installation.prepare()
    of_schema(directory, int(installation.schema.name[1:]))
    _load(directory, installation)
    return asyncio.run(loader.load(installation))


def _copy_compiled(directory: pathlib.Path) -> None:
    """Our compiled programs, as those of a copy that differs in comments alone."""
    fingerprint = subprocess.run(
        [sys.executable, "-c", "from bpf import sources; print(sources.fingerprint())"],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    compiled(directory).mkdir()
    for path in pathlib.Path(os.environ[artefacts.DIRECTORY_VARIABLE]).iterdir():
        content = json.loads(path.read_bytes()) | {"fingerprint": fingerprint}
        (compiled(directory) / path.name).write_text(json.dumps(content), encoding="ascii")


def _load(directory: pathlib.Path, installation: pins.Pins) -> None:
    """By a process of this version, with what is compiled in its directory, or else with ours."""
    environment = dict(os.environ)
    if compiled(directory).exists():
        environment[artefacts.DIRECTORY_VARIABLE] = str(compiled(directory))
    subprocess.run(
        [sys.executable, "-c", LOAD, str(installation.bpffs)],
        cwd=directory,
        env=environment,
        check=True,
        capture_output=True,
    )


def _substitute(path: pathlib.Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(encoding="ascii"), flags=re.M)
    assert count == 1, f"{pattern} is in {path.name} {count} times"
    path.write_text(text, encoding="ascii")

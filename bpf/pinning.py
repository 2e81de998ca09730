"""Loads program sets and pins them: all programs of one at once, or none.

The instructions are from an artefact of the image, else from a compile process, and both are loaded
here in the same way. If an agent is killed while it loads, the next one removes what is unfinished;
of two agents that load, one waits for the other and uses the programs that it pinned.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import pathlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping

from bpf import (
    artefacts,
    btf,
    compiling,
    errors,
    features,
    locks,
    map_specs,
    maps,
    sources,
    syscalls,
)
from bpf.artefacts import Artefact
from bpf.program_sets import ProgramSet, ProgramSpec

LOCK_SECONDS = 60.0
"""A load waits so long for another process's, which takes a second, or ten on emulated machines."""


class Origin(enum.StrEnum):
    """Where loaded programs came from."""

    PINNED = "pinned"
    """They were loaded before."""
    PREBUILT = "prebuilt"
    """Compiled with the image."""
    COMPILED = "compiled"
    """Compiled by bcc, just now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """reason: why programs were compiled instead of taken from an artefact, else empty."""

    origin: Origin
    reason: str = ""
    seconds: float = dataclasses.field(default=0.0, compare=False)
    """It took to load them; 0 if they were pinned."""


async def ensure_pinned(
    programs: ProgramSet,
    directory: pathlib.Path,
    map_directory: pathlib.Path | None = None,
    *,
    deferrable: Collection[str] = (),
    defers: bool = False,
) -> Outcome:
    """Load and pin the programs in `directory`, unless all required ones are pinned.

    map_directory: existing pins of maps there are used, and missing ones are made. None: new maps,
    pinned with the programs. deferrable: programs that are not required, and that `add` loads. With
    `defers` they are left to it, unless there is no artefact: compiling them again would take
    longer. Raises `PinError` or `CompileError`; then nothing is pinned in `directory`.
    """
    names = [
        program.name
        for program in programs.programs
        if not program.is_optional and program.name not in deferrable
    ]
    names += [] if map_directory else [spec.name for spec in programs.maps]
    started = time.perf_counter()
    if _are_pinned(directory, names):
        return Outcome(Origin.PINNED)
    artefact, outcome = await _artefact(programs)
    loaded = programs
    if defers and outcome.origin is Origin.PREBUILT:
        loaded = programs.only({each.name for each in programs.programs} - {*deferrable})

    def load() -> None:
        with _pinning(directory, names) as unfinished:
            if unfinished is not None:
                with _loaded(loaded, artefact, map_directory or unfinished) as descriptors:
                    _pin(loaded, descriptors, unfinished)

    await asyncio.to_thread(load)
    return dataclasses.replace(outcome, seconds=time.perf_counter() - started)


async def add(programs: ProgramSet, directory: pathlib.Path, map_directory: pathlib.Path) -> None:
    """Load and pin those of the programs that are not pinned in `directory`, which exists. Raises
    `PinError`, `CompileError` or `BpfError`; then some may be pinned."""

    def missing() -> ProgramSet:
        names = {program.name for program in programs.programs}
        return programs.only({name for name in names if not _are_pinned(directory, [name])})

    if not missing().programs:
        return
    artefact, _ = await _artefact(programs)

    def load() -> None:
        # Not while it verifies: who is stopped meanwhile would lock all others out.
        with (
            _loaded(missing(), artefact, map_directory) as descriptors,
            _exclusive(directory.parent),
        ):
            _pin(missing(), descriptors, directory)

    await asyncio.to_thread(load)


async def load_unpinned(programs: ProgramSet) -> dict[str, int]:
    """Load the programs, and make their maps. Returns descriptors of both, by name.

    Raises `CompileError` or `BpfError`; then none is left open.
    """
    artefact, _ = await _artefact(programs)

    def load() -> dict[str, int]:
        with contextlib.ExitStack() as undo:
            descriptors: dict[str, int] = {}
            for spec in programs.maps:
                descriptors[spec.name] = maps.create(spec)
                undo.callback(os.close, descriptors[spec.name])
            for program in programs.programs:
                fd = _load(program, artefact, descriptors, programs.needs)
                if fd is not None:
                    descriptors[program.name] = fd
                    undo.callback(os.close, fd)
            undo.pop_all()
        return descriptors

    return await asyncio.to_thread(load)


async def _artefact(programs: ProgramSet) -> tuple[Artefact, Outcome]:
    """Of the image, else compiled in a process. Raises `CompileError`."""
    offered = features.offered(programs.features)
    try:
        return artefacts.find(programs, offered), Outcome(Origin.PREBUILT)
    except artefacts.ArtefactError as missing:
        try:
            artefact = await compiling.compile_in_process(programs, offered)
        except errors.CompileError as error:
            raise errors.CompileError(f"{error}; {missing}") from error
        return artefact, Outcome(Origin.COMPILED, str(missing))


async def ensure_only(
    programs: ProgramSet,
    parent: pathlib.Path,
    name: str,
    map_directory: pathlib.Path | None = None,
) -> pathlib.Path:
    """As `ensure_pinned`, in a directory of `parent` for `name` and these sources; those for other
    sources are removed, of which open or attached objects live until they are closed. Returns it.
    """
    text = sources.expand(programs.source).encode()
    directory = parent / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    _remove_others(directory, name)
    await ensure_pinned(programs, directory, map_directory)
    return directory


def _remove_others(directory: pathlib.Path, name: str) -> None:
    for other in directory.parent.glob(f"{name}-*"):
        if not other.name.startswith(directory.name):
            shutil.rmtree(other)


def _are_pinned(directory: pathlib.Path, names: Collection[str]) -> bool:
    """Whether all of `names` exist in `directory`: an administrator may have removed one."""
    return all(os.path.lexists(directory / name) for name in names)


@contextlib.contextmanager
def _loaded(
    programs: ProgramSet, artefact: Artefact, map_directory: pathlib.Path
) -> Iterator[Mapping[str, int]]:
    """Descriptors of maps, which are pinned in `map_directory`, and of programs, by name."""
    with contextlib.ExitStack() as close:
        descriptors: dict[str, int] = {}
        templates = {spec.template for spec in programs.maps}
        for spec in programs.maps:
            path = map_directory / spec.name
            descriptors[spec.name] = _ensure_map(
                spec, path, descriptors, is_template=spec.name in templates
            )
            close.callback(os.close, descriptors[spec.name])
        # The verifier takes 0.1 s for the largest ones, on one CPU each.
        with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="verifier") as threads:
            loading = {
                program: threads.submit(_load, program, artefact, descriptors, programs.needs)
                for program in programs.programs
            }
        for program, load in loading.items():
            if not load.exception() and (fd := load.result()) is not None:
                descriptors[program.name] = fd
                close.callback(os.close, fd)
        for load in loading.values():
            load.result()
        yield descriptors


def _pin(programs: ProgramSet, descriptors: Mapping[str, int], directory: pathlib.Path) -> None:
    for program in programs.programs:
        if program.name in descriptors:
            syscalls.pin(descriptors[program.name], str(directory / program.name))


def _ensure_map(
    spec: map_specs.MapSpec, path: pathlib.Path, others: Mapping[str, int], *, is_template: bool
) -> int:
    """A descriptor of the map that is pinned at `path`, now or before. Raises `PinError`."""
    if os.path.lexists(path):
        return maps.Map.open(str(path), spec).fd
    if is_template:
        fd = maps.create_template(spec)
    else:
        fd = maps.create(spec, others.get(spec.template, 0))
    try:
        syscalls.pin(fd, str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _load(
    program: ProgramSpec, artefact: Artefact, descriptors: Mapping[str, int], needs: str
) -> int | None:
    """The program's descriptor; None for an optional one that the kernel rejects."""
    try:
        load = functools.partial(
            syscalls.program_load,
            program.type,
            artefact.functions[program.function].link(descriptors),
            attach_type=program.attach_type,
            name=program.name,
            attach_btf_id=_attach_btf_id(program),
        )
        return load()
    except errors.BpfError:
        if program.is_optional:
            return None
    try:
        return load(log=True)  # only now: the log makes the verifier slower
    except errors.BpfError as error:
        raise errors.CompileError(f"{error.strerror}; this needs {needs}") from error


def _attach_btf_id(program: ProgramSpec) -> int:
    if program.kernel_function:
        return btf.function_id(program.kernel_function)
    return btf.tracepoint_id(program.tracepoint) if program.tracepoint else 0


@contextlib.contextmanager
def _pinning(directory: pathlib.Path, names: Collection[str]) -> Iterator[pathlib.Path | None]:
    """A directory to pin in, renamed to `directory` in one step if the block succeeds.

    None if another process, for which this one has waited, has pinned all of `names` there. Removes
    the unfinished directory of a killed process.
    """
    unfinished = directory.with_name(f"{directory.name}-unfinished")
    with _exclusive(directory.parent):
        if _are_pinned(directory, names):
            yield None
            return
        for leftover in (unfinished, directory):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir(mode=0o700)
        yield unfinished
        os.rename(unfinished, directory)


@contextlib.contextmanager
def _exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel releases it when the process ends. Raises `PinError`
    if another keeps it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            locks.take(lock, LOCK_SECONDS)
        except errors.BpfError as error:
            raise errors.PinError(error.strerror) from error
        yield
    finally:
        os.close(lock)

"""Services and EndpointSlices from a file or a directory of files, followed while they change."""

import asyncio
import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterator

import structlog

from agent.linux.inotify import DirectoryWatches
from agent.logs import Event
from agent.pods import documents
from agent.pods.documents import Stamp
from agent.services.api import documents as service_documents
from agent.services.api.documents import MESSAGE, SERVICE, SLICE, FileContent, ObjectName
from agent.services.api.object_source import (
    Key,
    ObjectMirror,
    OnService,
    OnSlice,
    Services,
    Slices,
    SourcePosition,
)
from agent.services.api.objects import ApiService, EndpointSlice

log = structlog.get_logger(__name__)

# Editors and scripts write several files in a row.
_SETTLE_SECONDS = 0.05
# inotify reports nothing of network file systems, nor of the target of a symbolic link.
_RESYNC_SECONDS = 60.0
# Where the node has no inotify instance or watch left.
_POLL_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """One file as it was last read. kept: previous versions of what is not readable now."""

    stamp: Stamp
    content: FileContent
    kept: FileContent = dataclasses.field(default_factory=FileContent)
    is_readable: bool = True


class FileObjects:
    """An `ObjectSource`: a file, or all YAML and JSON files of a directory.

    A document with a mistake keeps its last valid version, also of the previous run; so do all of a
    file that cannot be read, and everything if there is no such file or directory. A file that is
    removed from a directory removes its objects.
    """

    saved_at: datetime.datetime | None = None

    def __init__(self, path: pathlib.Path, *, on_service: OnService, on_slice: OnSlice) -> None:
        self._path = path
        self._mirror = ObjectMirror(on_service, on_slice)
        self._files: dict[str, _File] = {}
        self._problems: tuple[str, ...] = ()
        self.synced = asyncio.Event()

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def services(self) -> Services:
        return self._mirror.services

    @property
    def slices(self) -> Slices:
        return self._mirror.slices

    def as_of(self) -> datetime.datetime:
        """What is in the files counts."""
        return datetime.datetime.now(datetime.UTC)

    @property
    def problems(self) -> dict[str, str]:
        if not self._problems:
            return {}
        more = len(self._problems) - 1
        return {self.name: self._problems[0] + (f" ({more} more problems)" if more else "")}

    def position(self) -> SourcePosition:
        return SourcePosition()

    def seed(
        self, services: list[ApiService], slices: list[EndpointSlice], position: SourcePosition
    ) -> None:
        self._mirror.seed(services, slices)

    async def run(self) -> None:
        changes = _PathChanges(self._path)
        with changes.open():
            while True:
                await asyncio.to_thread(changes.renew)
                await self.refresh()
                await changes.next()

    async def refresh(self) -> None:
        """Read what changed, and report the differences."""
        files, problem = await asyncio.to_thread(self._read)
        if problem:
            self._report([problem])
            return
        self._files = files
        services, slices, problems = _merged(list(files.values()))
        await self._mirror.replace(services, slices)
        self._report(problems)
        if not self.synced.is_set():
            counts = {"services": len(services), "slices": len(slices)}
            log.info(Event.SERVICES_SOURCE_READ, source=self.name, **counts)
            self.synced.set()

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._problems:
                log.warning(Event.SERVICES_SOURCE_INVALID, source=self.name, problem=problem)
        self._problems = tuple(problems)

    def _read(self) -> tuple[dict[str, _File], str]:
        """The files as they are now, or why nothing of them can be used. Blocks."""
        only = None if self._path.is_dir() else self._path.name
        directory = self._path if only is None else self._path.parent
        try:
            stamps = documents.stamps(directory, only)
        except OSError as error:
            return {}, f"{directory} cannot be read ({error.strerror}); create it"
        if only is not None and not stamps:
            return {}, f"{self._path} does not exist; create it"
        # In order of arrival: of two objects with one name, the first stays.
        files = {name: file for name, file in self._files.items() if name in stamps}
        for name in [*files, *sorted(stamps.keys() - files.keys())]:
            before = files.get(name)
            if before is None or before.stamp != stamps[name]:
                files[name] = self._read_file(directory / name, stamps[name], before)
        if files and not any(file.is_readable for file in files.values()) and not self._files:
            return {}, next(iter(files.values())).content.problems[0]
        return files, ""

    def _read_file(self, path: pathlib.Path, stamp: Stamp, before: _File | None) -> _File:
        previous = _previous(before, self._mirror)
        try:
            content = service_documents.read(path)
        except documents.DocumentError as error:
            problem = f"{error}; its last known services stay"
            return _File(stamp, FileContent(problems=[problem]), previous, is_readable=False)
        return _File(stamp, content, _rejected_of(previous, content.rejected))


def _previous(before: _File | None, mirror: ObjectMirror) -> FileContent:
    """What a file had before; of one that is read for the first time, what the previous run had of
    all files."""
    if before is None:
        return FileContent(dict(mirror.services), dict(mirror.slices))
    return FileContent(
        {**before.kept.services, **before.content.services},
        {**before.kept.slices, **before.content.slices},
    )


def _rejected_of(previous: FileContent, rejected: set[ObjectName | None]) -> FileContent:
    """What is kept of the previous content: a document without a name may be any of it."""
    return FileContent(
        {
            key: service
            for key, service in previous.services.items()
            if rejected & {None, (SERVICE, key), (MESSAGE, key)}
        },
        {
            key: found
            for key, found in previous.slices.items()
            if rejected & {None, (SLICE, key), (MESSAGE, (key[0], found.service))}
        },
    )


def _merged(
    files: list[_File],
) -> tuple[dict[Key, ApiService], dict[Key, EndpointSlice], list[str]]:
    """The objects of all files, and problems."""
    services: dict[Key, ApiService] = {}
    slices: dict[Key, EndpointSlice] = {}
    problems: list[str] = []
    for file in files:
        problems += file.content.problems
        for key, service in file.content.services.items():
            if services.setdefault(key, service) is not service:
                problems.append(f"Service {'/'.join(key)} is in two files; remove one of the two")
        for key, found in file.content.slices.items():
            if slices.setdefault(key, found) is not found:
                problems.append(
                    f"EndpointSlice {'/'.join(key)} is in two files; remove one of the two"
                )
    for file in files:
        services = {**file.kept.services, **services}
        slices = {**file.kept.slices, **slices}
    return services, slices, problems


class _PathChanges:
    """Reports that a directory, or the one of a file, may have changed. inotify costs nothing while
    nothing changes; without it an interval of two seconds remains."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._changed = asyncio.Event()
        self._watches: DirectoryWatches | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        try:
            self._watches = watches = DirectoryWatches(reports_writes=True)
        except OSError as error:
            log.warning(Event.SERVICES_SOURCE_INVALID, source=str(self._path), problem=str(error))
            yield
            return

        def on_readable() -> None:
            watches.drain()
            self._changed.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(watches.fileno(), on_readable)
        try:
            yield
        finally:
            loop.remove_reader(watches.fileno())
            watches.close()

    def renew(self) -> None:
        """Watch the directory that is there now, before it is read. Blocks."""
        if self._watches:
            is_directory = self._path.is_dir()
            self._watches.watch_only((self._path if is_directory else self._path.parent,))

    async def next(self) -> None:
        is_watched = self._watches is not None and not self._watches.problem
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESYNC_SECONDS if is_watched else _POLL_SECONDS):
                await self._changed.wait()
                await asyncio.sleep(_SETTLE_SECONDS)
        self._changed.clear()

"""Pods from a directory of manifests, one pod per file, followed while it changes.

Any change causes a scan of the whole directory (agent/pods/documents.py).
"""

import asyncio
import dataclasses
import pathlib

import msgspec
import structlog

from agent import tasks
from agent.linux import directory_changes
from agent.logs import Event
from agent.pods import documents
from agent.pods.pod import Pod, PodError, Problem, read_pod
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore

log = structlog.get_logger(__name__)

# A scan that failed, as on a machine without free descriptors, is made again.
_SCAN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Scan:
    """The directory's files, and the documents or `PodError`s of changed ones."""

    stamps: dict[str, documents.Stamp]
    changed: dict[str, object]
    is_whole: bool
    """Whether all files could be read."""


@dataclasses.dataclass(slots=True)
class _ManifestFile:
    """One manifest file."""

    stamp: documents.Stamp
    pod: Pod
    """The pod as in the store: of the last valid content, with the newest problem."""
    was_valid: bool
    """Whether this file ever was a valid manifest."""


class ManifestDirectory:
    """Writes the pods of a directory into the store."""

    def __init__(
        self,
        directory: pathlib.Path,
        store: PodStore,
        modes: PodModes,
    ) -> None:
        self._directory = directory
        self._modes = modes
        self._store = store
        self._changed_modes = modes.changes.subscribe()
        self._files: dict[str, _ManifestFile] = {}
        self._unread_since: float | None = None
        """Since when a file or the directory could not be read, by the event loop's clock."""

    @property
    def read_at(self) -> float:
        """As of `PodSource`: the directory is watched, so what was read is current."""
        now = asyncio.get_running_loop().time()
        return now if self._unread_since is None else self._unread_since

    def _set_readable(self, *, is_readable: bool) -> None:
        if is_readable:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = asyncio.get_running_loop().time()

    def refresh(self) -> None:
        """Read changed files and update the store.

        The last valid pod of a file that became invalid stays in force, with its problem reported:
        a typing error must not open a gate. Raises `OSError` if the directory is missing.
        """
        while self._apply(self._read_changed()):
            pass

    async def run(self) -> None:
        """Refresh at each change, and follow the node's modes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "files of manifests", self._follow_files)
            tasks.start(group, "modes of manifests", self._follow_modes)

    async def _follow_modes(self) -> None:
        while True:
            await self._changed_modes.next()
            for file in self._files.values():
                file.pod = self._with_mode(file.pod)
                self._store.set_pod(file.pod)

    async def _follow_files(self) -> None:
        """Files are read in a thread."""
        async for scan in directory_changes.read(
            self._directory, read=self._try_to_read, at_least_every_seconds=_SCAN_SECONDS
        ):
            while not isinstance(scan, OSError) and self._apply(scan):
                scan = await asyncio.to_thread(self._try_to_read)
            if isinstance(scan, OSError):
                self._set_readable(is_readable=False)
                log.error(
                    Event.MANIFESTS_UNREADABLE, directory=str(self._directory), error=str(scan)
                )

    def _try_to_read(self) -> _Scan | OSError:
        try:
            return self._read_changed()
        except OSError as error:
            return error

    def _read_changed(self) -> _Scan:
        """The directory's files, with the content of new and changed ones."""
        stamps = documents.stamps(self._directory)
        changed: dict[str, object] = {}
        is_whole = True
        for name, stamp in list(stamps.items()):
            file = self._files.get(name)
            if file is None or file.stamp != stamp:
                try:
                    changed[name] = documents.read_one(self._directory / name)
                except documents.BusyError:
                    is_whole = False
                    # As it was; the next scan reads it again.
                    if file is None:
                        del stamps[name]
                    else:
                        stamps[name] = file.stamp
                except documents.DocumentError as error:
                    changed[name] = PodError("InvalidManifest", f"{error}.")
        return _Scan(stamps, changed, is_whole)

    def _apply(self, scan: _Scan) -> bool:
        """Update the store; returns whether another scan is needed.

        It is for files that were rejected because a file that is now deleted had their pod.
        """
        deleted = self._files.keys() - scan.stamps.keys()
        for name in deleted:
            self._remove(self._files.pop(name).pod.uid)
        for name, document in sorted(scan.changed.items()):
            self._read(name, scan.stamps[name], document)
        self._set_readable(is_readable=scan.is_whole)
        waiting = [
            file for file in self._files.values() if deleted and _is_rejected_duplicate(file)
        ]
        for file in waiting:
            file.stamp = documents.NEVER_READ
        return bool(waiting)

    def _read(self, name: str, stamp: documents.Stamp, document: object) -> None:
        previous = self._files.get(name)
        try:
            if isinstance(document, PodError):
                raise document
            pod = read_pod(document, source=name)
            self._reject_duplicate(pod)
        except PodError as error:
            self._files[name] = self._invalid(name, stamp, error.problem)
            self._store.set_pod(self._files[name].pod)
            return
        if previous and previous.pod.uid != pod.uid:
            self._remove(previous.pod.uid)
        pod = self._with_mode(pod)
        self._files[name] = _ManifestFile(stamp, pod, was_valid=True)
        self._store.set_pod(pod)

    def _invalid(self, name: str, stamp: documents.Stamp, problem: Problem) -> _ManifestFile:
        previous = self._files.get(name)
        if previous and previous.was_valid:
            text = f"{problem.message} The last valid version stays in force."
            problem = Problem(problem.reason, text)
            pod = msgspec.structs.replace(previous.pod, manifest_problem=problem)
            return _ManifestFile(stamp, pod, was_valid=True)
        pod = Pod(
            uid=f"file:{name}", namespace="", name=name, source=name, manifest_problem=problem
        )
        return _ManifestFile(stamp, self._with_mode(pod), was_valid=False)

    def _with_mode(self, pod: Pod) -> Pod:
        """A label that is no mode affects nothing else of the manifest."""
        decision = self._modes.of_pod(pod.uid, pod.namespace, pod.labels)
        return msgspec.structs.replace(pod, mode=decision.mode, mode_problems=decision.problems)

    def _remove(self, uid: str) -> None:
        self._store.remove_pod(uid)
        self._modes.forget(uid)

    def _reject_duplicate(self, pod: Pod) -> None:
        for name, file in self._files.items():
            if name != pod.source and file.was_valid and _is_same_pod(file.pod, pod):
                raise PodError(
                    "DuplicatePod",
                    f"{pod.source} has pod {pod.full_name}, which {name} already has; remove one "
                    "of the two.",
                )


def _is_rejected_duplicate(file: _ManifestFile) -> bool:
    problem = file.pod.manifest_problem
    return problem is not None and problem.reason == "DuplicatePod"


def _is_same_pod(first: Pod, second: Pod) -> bool:
    pair = (first.namespace, first.name)
    return first.uid == second.uid or pair == (second.namespace, second.name)

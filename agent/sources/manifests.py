"""Pods from a directory of manifests, one pod a file, followed while it changes.

Every change, whatever it was, means one more look at the whole directory (agent/pods/documents.py).
"""

import asyncio
import dataclasses
import pathlib

import msgspec
import structlog

from agent.pods import documents
from agent.pods.pod import Pod, PodError, Problem, read_pod
from agent.pods.store import PodStore
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """One look at the directory: all files, and the changed ones' documents or `PodError`s."""

    stamps: dict[str, documents.Stamp]
    changed: dict[str, object]


@dataclasses.dataclass(slots=True)
class _File:
    """What is known of one manifest file."""

    stamp: documents.Stamp
    pod: Pod
    """The pod as last told, with the newest problem; the rest from the last good content."""
    is_good: bool
    """Whether this file ever held a good manifest."""


class ManifestDirectory:
    """Writes the pods of a directory into the store."""

    def __init__(
        self,
        directory: pathlib.Path,
        store: PodStore,
        *,
        default_mode: Mode,
    ) -> None:
        self._directory = directory
        self._default_mode = default_mode
        self._store = store
        self._files: dict[str, _File] = {}

    def refresh(self) -> None:
        """Read what changed since the last look and tell about it.

        A file that stopped being a pod keeps its last good pod in force, with the problem noted:
        a slip of the pen must not open a gate. Raises `OSError` when the directory is not there.
        """
        while self._apply(self._read_changed()):
            pass

    async def run(self) -> None:
        """Look whenever something changes, for ever; files are read beside the event loop."""
        async for _ in documents.changes(self._directory):
            try:
                while self._apply(await asyncio.to_thread(self._read_changed)):
                    pass
            except OSError as error:
                log.error(
                    "manifest directory cannot be read; pods stay as they are",
                    directory=str(self._directory),
                    error=str(error),
                )

    def _read_changed(self) -> _Look:
        """What the directory holds now, with the content of files that are new or changed."""
        stamps = documents.stamps(self._directory)
        changed: dict[str, object] = {}
        for name, stamp in stamps.items():
            known = self._files.get(name)
            if known is None or known.stamp != stamp:
                try:
                    changed[name] = documents.read_one(self._directory / name)
                except documents.DocumentError as error:
                    changed[name] = PodError("InvalidManifest", f"{error}.")
        return _Look(stamps, changed)

    def _apply(self, look: _Look) -> bool:
        """Tell what changed; whether files wait for another look.

        Those that were refused because a file that is gone now held their pod.
        """
        gone = self._files.keys() - look.stamps.keys()
        for name in gone:
            self._store.remove_pod(self._files.pop(name).pod.uid)
        for name, document in sorted(look.changed.items()):
            self._take(name, look.stamps[name], document)
        waiting = [file for file in self._files.values() if gone and _is_refused_twin(file)]
        for file in waiting:
            file.stamp = documents.NEVER_READ
        return bool(waiting)

    def _take(self, name: str, stamp: documents.Stamp, document: object) -> None:
        known = self._files.get(name)
        try:
            if isinstance(document, PodError):
                raise document
            pod = read_pod(document, default_mode=self._default_mode, source=name)
            self._refuse_twin(pod)
        except PodError as error:
            self._files[name] = self._broken(name, stamp, error.problem)
            self._store.set_pod(self._files[name].pod)
            return
        if known and known.pod.uid != pod.uid:
            self._store.remove_pod(known.pod.uid)
        self._files[name] = _File(stamp, pod, is_good=True)
        self._store.set_pod(pod)

    def _broken(self, name: str, stamp: documents.Stamp, problem: Problem) -> _File:
        known = self._files.get(name)
        if known and known.is_good:
            note = Problem(problem.reason, f"{problem.message} The last good one stays in force.")
            pod = msgspec.structs.replace(known.pod, manifest_problem=note)
            return _File(stamp, pod, is_good=True)
        pod = Pod(
            uid=f"file:{name}", namespace="", name=name, source=name, manifest_problem=problem
        )
        return _File(stamp, pod, is_good=False)

    def _refuse_twin(self, pod: Pod) -> None:
        for name, file in self._files.items():
            if name != pod.source and file.is_good and _is_same_pod(file.pod, pod):
                raise PodError(
                    "DuplicatePod",
                    f"{pod.source} describes pod {pod.full_name}, which {name} describes already; "
                    "remove one of the two.",
                )


def _is_refused_twin(file: _File) -> bool:
    problem = file.pod.manifest_problem
    return problem is not None and problem.reason == "DuplicatePod"


def _is_same_pod(one: Pod, other: Pod) -> bool:
    return one.uid == other.uid or (one.namespace, one.name) == (other.namespace, other.name)

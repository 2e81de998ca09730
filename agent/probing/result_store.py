"""Saved probe results of each pod, and the specs they ran with: they outlive the agent.

The kubelet keeps a container ready over its own restart (worker.go, where a container started well
before the kubelet); podgate has no status to read yet, so it keeps a file of its own.
"""

import asyncio
import pathlib
import time

import msgspec

from agent import state_files
from agent.linux.procfs import boot_id
from agent.logs import Event
from agent.state_files import StateSaver
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeResult

_SETTLE_SECONDS = 0.5
# Every pod is reconciled within seconds of a start; unclaimed results belong to deleted pods.
_UNCLAIMED_SECONDS = 300.0

Results = dict[str, dict[ProbeType, ProbeResult]]
"""By container."""


class SavedProbes(msgspec.Struct, kw_only=True):
    """One pod's probes in one life of its network namespace."""

    uid: str
    sandbox: str
    """See `sandbox_of`."""
    started_at: float
    """Unix time in seconds at which podgate first saw the sandbox."""
    annotation: str | None = None
    """podgate.io/probe-spec, the newest that was valid."""
    is_taken: bool = False
    """Whether one was."""
    results: Results = {}
    containers: dict[str, str] = {}
    """The runtime's ids of the probed containers, where a runtime lists them."""


class _File(msgspec.Struct):
    boot: str
    """A reboot ends every sandbox, and its numbers start again."""
    pods: list[SavedProbes]


class ResultStore:
    """Sandboxes by pod, in memory and in a file below the run directory."""

    def __init__(self, path: pathlib.Path | None) -> None:
        """Reads the file, if it exists; an unusable one is logged and kept.

        Without a path nothing is kept.
        """
        self._saver = path and StateSaver(
            path,
            self._content,
            failure=Event.RESULTS_NOT_SAVED,
            settle_seconds=_SETTLE_SECONDS,
        )
        self._boot = boot_id()
        self._pods: dict[str, SavedProbes] = {}
        self._unclaimed = {} if path is None else {pod.uid: pod for pod in self._read(path)}
        self._unclaimed_until = time.monotonic() + _UNCLAIMED_SECONDS

    def claim(self, uid: str, sandbox: str) -> SavedProbes:
        """The saved probes of this sandbox of the pod; empty for a new one."""
        saved = self._pods.get(uid) or self._unclaimed.pop(uid, None)
        now = time.time()
        if saved is None or saved.sandbox != sandbox:
            saved = SavedProbes(uid=uid, sandbox=sandbox, started_at=now)
        saved.started_at = min(saved.started_at, now)
        if self._pods.get(uid) is not saved:
            self._pods[uid] = saved
            self.save_soon()
        return saved

    def get(self, uid: str) -> SavedProbes | None:
        return self._pods.get(uid)

    def forget(self, uid: str) -> None:
        """The pod no longer exists."""
        if self._pods.pop(uid, None) is not None:
            self.save_soon()

    def save_soon(self) -> None:
        """The content has changed."""
        if self._saver:
            self._saver.mark()

    async def run(self) -> None:
        """Write the file soon after each change, and at the end."""
        if self._saver:
            await self._saver.run()
        else:
            await asyncio.Event().wait()

    def _read(self, path: pathlib.Path) -> list[SavedProbes]:
        saved = state_files.read(path, _File, failure=Event.SAVED_RESULTS_UNREADABLE)
        return saved.pods if saved and saved.boot == self._boot else []

    def _content(self) -> bytes:
        if time.monotonic() > self._unclaimed_until:
            self._unclaimed.clear()
        pods = [*self._pods.values(), *self._unclaimed.values()]
        return msgspec.json.encode(_File(self._boot, pods))


def reported_results(since: float | None, started_at: float) -> dict[ProbeType, ProbeResult]:
    """A container's results that the file has lost, by a previous agent's condition of the sandbox.

    since: Unix time in whole seconds since when the condition is True; None if it is not.
    started_at: Unix time in seconds of the container's start, 0 if unknown: a run that is later
    than the condition has no results.
    """
    if since is None or not 0 < int(started_at) <= since:
        return {}
    return dict.fromkeys((ProbeType.STARTUP, ProbeType.READINESS), ProbeResult.SUCCESS)


def sandbox_of(netns: Netns) -> str:
    """A sandbox's name within this boot: the namespace's device, inode and cookie.

    Inodes are used again for later namespaces, cookies never are; kernels before 5.14 have none.
    """
    return f"{netns.device}:{netns.inode}:{netns.cookie() or '-'}"

"""Who is the kubelet: its cgroup, found and followed for as long as the agent runs.

A restart of its unit gives the kubelet a new cgroup with a new id, and the gate goes by that id: a
kubelet that is not followed fails every probe. Its end is heard by pidfd at once; then /proc is
looked at until it is back.
"""

import asyncio
import os
import pathlib
import time
from collections.abc import Callable

import structlog

from agent.kubelet import search as kubelet_search
from agent.kubelet.search import KubeletCgroup, KubeletCgroupError
from agent.linux.cgroups import cgroup2_mount
from agent.linux.procfs import Procfs
from agent.settings import KubeletSetting

log = structlog.get_logger(__name__)

# With a scan of some milliseconds, a restart is followed within 100 ms. The kubelet's shortest
# probe time-out is 1 s; a SYN that was dropped before is sent again only after that.
_MISSING_SECONDS = 0.03
# A restart takes seconds, an upgrade a minute; after that the node is being worked on.
_PATIENCE_SECONDS = 60.0
_LONG_MISSING_SECONDS = 1.0
# For what no event tells of: the process moved to another cgroup, pods that came into its own.
_RECHECK_SECONDS = 2.0
# One look reads some files for each process of the node; a stuck one must not go unnoticed.
_LOOK_SECONDS = 30.0


class KubeletIdentity:
    """Calls `on_change` on the event loop whenever the kubelet's cgroup is another, or none."""

    def __init__(
        self,
        setting: KubeletSetting,
        on_change: Callable[[KubeletCgroup | None], None],
        *,
        procfs: Procfs | None = None,
        cgroup2: pathlib.Path | None = None,
    ) -> None:
        """procfs, cgroup2: for tests; else /proc, and cgroup v2 as found in /proc/mounts."""
        self._setting = setting
        self._on_change = on_change
        self._procfs = procfs or Procfs()
        self._cgroup2 = cgroup2
        self.current: KubeletCgroup | None = None
        """What `on_change` was told last."""
        self.problem = "the kubelet has not been looked for yet."
        """One sentence why there is none, or nothing."""

    async def run(self) -> None:
        """Look at once, and follow the kubelet until cancelled.

        Raises `TimeoutError` when /proc does not answer, and whatever `on_change` does.
        """
        found_at = time.monotonic()
        while True:
            await self.refresh()
            if self.current is None:
                patient = time.monotonic() - found_at < _PATIENCE_SECONDS
                await asyncio.sleep(_MISSING_SECONDS if patient else _LONG_MISSING_SECONDS)
                continue
            found_at = time.monotonic()
            if self.current.pid is None:
                # A named cgroup without a process: nothing would tell of its being made anew.
                await asyncio.sleep(_MISSING_SECONDS)
            else:
                await _wait_exit(self.current.pid, _RECHECK_SECONDS)

    async def refresh(self) -> KubeletCgroup | None:
        """Look once, tell of a change, and return what there is now."""
        problem = f"there is no {self._setting} on this node"
        found: KubeletCgroup | None = None
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                found = await asyncio.to_thread(self._find)
            problem = "" if found else f"{problem}; set who the kubelet is, and run with hostPID."
        except KubeletCgroupError as refused:
            problem = str(refused)
        self._publish(found, problem)
        return found

    def _find(self) -> KubeletCgroup | None:
        cgroup2 = self._cgroup2 or cgroup2_mount()
        if cgroup2 is None:
            raise KubeletCgroupError(
                "no cgroup v2 is mounted, and the kubelet is known by its cgroup."
            )
        return kubelet_search.find(
            self._setting, procfs=self._procfs, cgroup2=cgroup2, keep=self.current
        )

    def _publish(self, found: KubeletCgroup | None, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("kubelet not admitted", problem=problem)
        before, self.current, self.problem = self.current, found, problem
        if found == before:
            return
        if found is not None:
            log.info(
                "kubelet found",
                pid=found.pid,
                cgroup=found.path,
                cgroup_id=found.id,
                shared=found.is_shared,
            )
        self._on_change(found)


async def _wait_exit(pid: int, limit_seconds: float) -> None:
    """Wait until the process has ended, or for so long."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        # It ended since, or it is not of our PID namespace; the next look will tell.
        await asyncio.sleep(_MISSING_SECONDS)
        return
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(limit_seconds):
            await ended.wait()
    except TimeoutError:
        return
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)

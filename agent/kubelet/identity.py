"""Kubelet identity: finds the kubelet's cgroup and follows its restarts.

A restart of its unit gives the kubelet a new cgroup with a new id, and gates admit by that id:
probes of a kubelet that is not followed all fail. A pidfd signals its exit at once; then /proc is
polled until it is back.
"""

import asyncio
import contextlib
import os
import pathlib
import time
from collections.abc import Callable

import structlog

from agent import batches, tasks
from agent.kubelet import search as kubelet_search
from agent.kubelet.search import AmbiguousKubeletError, KubeletCgroup, KubeletCgroupError
from agent.linux import descriptors
from agent.linux.cgroups import cgroup2_mount
from agent.linux.inotify import DirectoryWatches
from agent.linux.procfs import Procfs
from agent.logs import Event
from agent.settings import KubeletSetting

log = structlog.get_logger(__name__)

# With a scan of some milliseconds, a restart is detected within 100 ms. The kubelet's shortest
# probe timeout is 1 s, and a dropped SYN is sent again only after that.
_MISSING_SECONDS = 0.03
# A restart takes seconds, an upgrade a minute; after that the node is in maintenance.
_PATIENCE_SECONDS = 60.0
_LONG_MISSING_SECONDS = 1.0
# The same time as the agent's own (`agent/gates/heartbeat.py`): longer than a restart takes, also
# with the RestartSec=10 of kubeadm's unit, and shorter than pods survive failing probes.
_OVERDUE_SECONDS = 15.0
# For changes without an event: the process moves to another cgroup, pods appear in its own.
_RECHECK_SECONDS = 2.0
# A scan reads the name of each process of the node, so it is rarer than checks of the one that was
# found: another one may serve the kubelet's port. One that was found before it did so shows that
# within the first minute.
_SCAN_PERIOD_SECONDS = 30.0
_NEW_SECONDS = 60.0
# A scan reads some files for each process of the node; a hanging one must not go unnoticed.
_SCAN_SECONDS = 30.0


class KubeletIdentity:
    """Calls `on_change` on the event loop after the first search, and when the kubelet's cgroup,
    `is_rejected` or `is_overdue` changes."""

    def __init__(
        self,
        setting: KubeletSetting,
        on_change: Callable[[KubeletCgroup | None], None],
        *,
        procfs: Procfs | None = None,
        cgroup2: pathlib.Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """procfs, cgroup2: for tests; default: /proc, and cgroup v2 as in /proc/mounts."""
        self._setting = setting
        self._on_change = on_change
        self._procfs = procfs or Procfs()
        self._cgroup2 = cgroup2
        self._now = now
        self.current: KubeletCgroup | None = None
        """The last value passed to `on_change`."""
        self.problem = "the search for the kubelet has not finished yet."
        """Why there is none, in one sentence; else empty."""
        self.is_rejected = False
        """Whether there is none because its cgroup must not be admitted, such as one with pods."""
        self.is_overdue = False
        """Whether it has been missing for longer than a restart takes."""
        self._published: tuple[KubeletCgroup | None, bool, bool] | None = None
        self._found_at: float | None = None
        self._changed_at = self._scanned_at = float("-inf")
        """When another process was found, and when all were scanned."""

    async def run(self) -> None:
        """Follow the kubelet until cancelled.

        Raises `TimeoutError` if /proc hangs, and the errors of `on_change`.
        """
        while True:
            await self.refresh()
            if self.current is None:
                is_recent = self._missing_seconds() < _PATIENCE_SECONDS
                await asyncio.sleep(_MISSING_SECONDS if is_recent else _LONG_MISSING_SECONDS)
                continue
            if self.current.pid is None:
                # A cgroup that is named, before the kubelet is in it.
                await self._wait_for_change(self.current)
            else:
                await _wait_exit(self.current.pid, tasks.next_tick(_RECHECK_SECONDS))

    async def _wait_for_change(self, current: KubeletCgroup) -> None:
        """Until a cgroup without a process may have been removed, or made again."""
        assert self._cgroup2 is not None
        directory = self._cgroup2 / current.path[1:]
        try:
            with contextlib.closing(DirectoryWatches()) as watches:
                watches.watch_only([directory.parent])
                # Read after the watch, so no change is missed.
                is_current = directory.stat().st_ino == current.id
                if is_current and watches.has(directory.parent):
                    async with asyncio.timeout_at(tasks.next_tick(_RECHECK_SECONDS)):
                        await descriptors.readable(watches)
        except TimeoutError:
            return
        except OSError:
            pass  # it is gone, or this user has no inotify instance left
        await asyncio.sleep(_MISSING_SECONDS)

    async def refresh(self) -> KubeletCgroup | None:
        """Search once, publish a change, and return the result."""
        problem = f"no {self._setting} on this node"
        found: KubeletCgroup | None = None
        is_rejected = False
        try:
            async with asyncio.timeout(_SCAN_SECONDS):
                found = await batches.in_thread(self._find)
            problem = "" if found else f"{problem}; set --kubelet, and run with hostPID."
        except KubeletCgroupError as error:
            problem = str(error)
            is_rejected = not isinstance(error, AmbiguousKubeletError)
        self._publish(found, problem, is_rejected)
        return found

    def _missing_seconds(self) -> float:
        """Since it was found last, or since the first search."""
        now = self._now()
        if self.current is not None or self._found_at is None:
            self._found_at = now
        return now - self._found_at

    def _find(self) -> KubeletCgroup | None:
        if self._cgroup2 is None:
            # Once: the mounts of a node with a hundred pods take longer than the search itself.
            self._cgroup2 = cgroup2_mount()
        if self._cgroup2 is None:
            raise KubeletCgroupError(
                "cgroup v2 is not mounted; the kubelet is identified by its cgroup."
            )
        now = self._now()
        is_new = self.current is None or now < self._changed_at + _NEW_SECONDS
        if scans := is_new or now >= self._scanned_at + _SCAN_PERIOD_SECONDS:
            self._scanned_at = now
        return kubelet_search.find(
            self._setting,
            procfs=self._procfs,
            cgroup2=self._cgroup2,
            current=self.current,
            scans=scans,
        )

    def _publish(self, found: KubeletCgroup | None, problem: str, is_rejected: bool) -> None:
        if problem and problem != self.problem:
            log.warning(Event.KUBELET_NOT_FOUND, problem=problem)
        before = self.current
        if found is None or before is None or found.pid != before.pid:
            self._changed_at = self._now()
        self.current, self.problem, self.is_rejected = found, problem, is_rejected
        self.is_overdue = self._missing_seconds() >= _OVERDUE_SECONDS
        published = found, is_rejected, self.is_overdue
        if published == self._published:
            return
        self._published = published
        if found is not None and found != before:
            log.info(
                Event.KUBELET_FOUND,
                pid=found.pid,
                cgroup=found.path,
                cgroup_id=found.id,
                shared=found.is_shared,
            )
        self._on_change(found)


async def _wait_exit(pid: int, limit: float) -> None:
    """Wait until the process exits, at most until `limit` by the loop's clock."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        # It has exited, or is in another PID namespace; the next search shows which.
        await asyncio.sleep(_MISSING_SECONDS)
        return
    exited = asyncio.Event()
    loop.add_reader(descriptor, exited.set)
    try:
        async with asyncio.timeout_at(limit):
            await exited.wait()
    except TimeoutError:
        return
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)

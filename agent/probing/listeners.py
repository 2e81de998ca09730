"""Listener events of probed pods: from the kernel's ring to the probes that they concern.

Everything works without them, only later: where the kernel or cgroup v2 lacks them, that is logged
once, and probes run at their times.
"""

import asyncio
import contextlib
import pathlib
from typing import NoReturn

import structlog

from agent.linux.cgroups import cgroup2_mount
from agent.logs import Event
from agent.probing.metrics import ProbeMetrics
from bpf import errors, listeners, pins
from probes import listening
from probes.engine.hints import HintResult, ListenerHints
from probes.engine.scheduler import Scheduler
from probes.netns import Netns, NetnsError

log = structlog.get_logger(__name__)


class ListenerWatch:
    """Receives listener events of pods' namespaces, and triggers their probes at that instant."""

    def __init__(
        self, scheduler: Scheduler, metrics: ProbeMetrics, installation: pins.Pins
    ) -> None:
        self.attached = asyncio.Event()
        """Set once events are received."""
        self._metrics = metrics
        self._installation = installation
        self._hints = ListenerHints(scheduler, on_result=self._on_hint_result)
        self._events: listeners.ListenerEvents | None = None
        self._watched: dict[str, tuple[Netns, int]] = {}
        self._pods: dict[int, str] = {}
        self._existing: asyncio.Queue[str] = asyncio.Queue()
        """Pods with listeners that are older than our watching."""

    async def run(self) -> None:
        """Attach, and follow events until cancelled."""
        try:
            directory = await listeners.load(self._installation)
            events = _attach(directory)
        except (errors.CompileError, errors.PinError, errors.AttachError, OSError) as error:
            log.warning(Event.LISTENER_EVENTS_UNAVAILABLE, reason=str(error))
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        with events:
            self._events = events
            for uid, (netns, cookie) in list(self._watched.items()):
                self._watch_netns(uid, netns, cookie)
            loop.add_reader(events.fileno(), self._read)
            self.attached.set()
            try:
                await self._adopt_existing(directory)
            finally:
                loop.remove_reader(events.fileno())
                self._events = None
                self._hints.close()

    def watch(self, uid: str, netns: Netns) -> None:
        """Receive events of this pod's listeners from now on; safe to repeat."""
        known = self._watched.get(uid)
        if known is not None and known[0] == netns:
            return
        self.forget(uid)
        cookie = netns.cookie()
        if cookie is None:
            return
        self._watched[uid] = (netns, cookie)
        self._pods[cookie] = uid
        self._watch_netns(uid, netns, cookie)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        known = self._watched.pop(uid, None)
        self._hints.forget(uid)
        if known is not None:
            self._pods.pop(known[1], None)
            self._metrics.unwatched_listeners.pop(uid, None)
            if self._events is not None:
                self._events.forget(known[1])

    def _watch_netns(self, uid: str, netns: Netns, cookie: int) -> None:
        if self._events is None:
            return
        try:
            self._events.watch(cookie)
        except errors.BpfError as error:
            log.warning(Event.LISTENERS_NOT_WATCHED, uid=uid, reason=str(error))
            return
        # Existing listeners send no event when they close. Read after the watch started, so that
        # none is missed by both.
        with contextlib.suppress(NetnsError, OSError):
            if older := len(listening.listeners(netns)):
                self._metrics.unwatched_listeners[uid] = older
                self._existing.put_nowait(uid)

    async def _adopt_existing(self, directory: pathlib.Path) -> NoReturn:
        """Make them report all the same, one pod after the other, until cancelled."""
        while True:
            uid = await self._existing.get()
            known = self._watched.get(uid)
            if known is None:
                continue
            try:
                adopted = await asyncio.to_thread(listeners.adopt, directory, known[0].run_inside)
            except (NetnsError, errors.PinError, OSError) as error:
                log.warning(Event.EXISTING_LISTENERS_UNWATCHED, uid=uid, reason=str(error))
                continue
            if self._watched.get(uid) == known:
                left = self._metrics.unwatched_listeners.get(uid, 0) - adopted
                self._metrics.unwatched_listeners[uid] = max(0, left)

    def _read(self) -> None:
        events = self._events
        if events is None:
            return
        # The last hint of a port shows the current state.
        newest = {(hint.netns_cookie, hint.port): hint.is_open for hint in events.read()}
        for (cookie, port), is_open in newest.items():
            if uid := self._pods.get(cookie):
                self._hints.hint(uid, port, is_open=is_open)
        self._metrics.listener_events_lost = events.lost()

    def _on_hint_result(self, is_open: bool, fate: HintResult) -> None:
        kind = "open" if is_open else "close"
        self._metrics.listener_events.labels(kind, fate.value).inc()


def _attach(directory: pathlib.Path) -> listeners.ListenerEvents:
    root = cgroup2_mount()
    if root is None:
        raise errors.AttachError("cgroup v2 is not mounted any more")
    return listeners.ListenerEvents(directory, root)

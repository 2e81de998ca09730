"""Listener events of probed pods: each triggers the probes of its port.

Without them probes run at their scheduled times only, so conditions change later. A kernel or
cgroup v2 that lacks them is logged once.
"""

import asyncio
import contextlib
import pathlib
from typing import NoReturn

import structlog

from agent.linux.cgroups import cgroup2_mount
from agent.linux.procfs import raise_own
from agent.logs import Event
from agent.probing.metrics import ProbeMetrics
from bpf import errors, listeners, pins
from probes import listening
from probes.engine.hints import HintResult, ListenerHints
from probes.engine.scheduler import Scheduler
from probes.netns import Netns, NetnsError

log = structlog.get_logger(__name__)


class ListenerWatch:
    """Receives listener events of pods' namespaces, and triggers their probes at once."""

    def __init__(
        self, scheduler: Scheduler, metrics: ProbeMetrics, installation: pins.Pins
    ) -> None:
        self.attached = asyncio.Event()
        """Set once events are received."""
        self._scheduler = scheduler
        self._metrics = metrics
        self._installation = installation
        self._hints = ListenerHints(scheduler, on_result=self._on_hint_result)
        self._events: listeners.ListenerEvents | None = None
        self._watched: dict[str, tuple[Netns, int]] = {}
        self._pods: dict[int, str] = {}
        self._existing: asyncio.Queue[tuple[str, dict[int, int]]] = asyncio.Queue()
        """Pods with listeners that were opened before the watch started: their ports by cookie."""

    async def run(self) -> None:
        """Attach, and follow events until cancelled. Raises `OSError` without a descriptor or
        memory."""
        try:
            directory = await listeners.load(self._installation)
            events = _attach(directory)
        except (errors.CompileError, errors.PinError, errors.AttachError, OSError) as error:
            if isinstance(error, OSError):
                raise_own(error)
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
                await self._adopt_existing(directory, events)
            finally:
                loop.remove_reader(events.fileno())
                self._events = None
                self._hints.close()

    def watch(self, uid: str, netns: Netns) -> None:
        """Receive events of this pod's listeners from now on; safe to repeat."""
        watched = self._watched.get(uid)
        if watched is not None and watched[0] == netns:
            return
        self.forget(uid)
        cookie = netns.cookie()
        if cookie is None:
            return
        self._watched[uid] = (netns, cookie)
        self._pods[cookie] = uid
        self._watch_netns(uid, netns, cookie)

    def forget(self, uid: str) -> None:
        """The pod no longer exists."""
        watched = self._watched.pop(uid, None)
        self._hints.forget(uid)
        if watched is not None:
            self._pods.pop(watched[1], None)
            self._metrics.unwatched_listeners.pop(uid, None)
            if self._events is not None:
                self._events.forget(watched[1])

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
            if existing := listening.ports_by_cookie(netns):
                self._metrics.unwatched_listeners[uid] = len(existing)
                self._existing.put_nowait((uid, existing))

    async def _adopt_existing(
        self, directory: pathlib.Path, events: listeners.ListenerEvents
    ) -> NoReturn:
        """Have existing listeners send events too, one pod after the other, until cancelled."""
        while True:
            uid, existing = await self._existing.get()
            watched = self._watched.get(uid)
            if watched is None:
                continue
            netns, cookie = watched
            try:
                adopted = await asyncio.to_thread(listeners.adopt, directory, netns.run_inside)
                if self._watched.get(uid) != watched:
                    continue
                if not adopted:
                    adopted = events.adopt(cookie, existing)
                remaining = listening.ports_by_cookie(netns)
            except (NetnsError, errors.PinError, OSError) as error:
                log.warning(Event.EXISTING_LISTENERS_UNWATCHED, uid=uid, reason=str(error))
                continue
            left = self._metrics.unwatched_listeners.get(uid, 0) - adopted
            self._metrics.unwatched_listeners[uid] = max(0, left)
            # Those that closed since the watch started may have sent no event.
            for port in {existing[closed] for closed in existing.keys() - remaining.keys()}:
                self._hints.hint(uid, port, is_open=False)

    def _read(self) -> None:
        events = self._events
        if events is None:
            return
        # The last hint of a port shows the current state.
        newest = {(hint.netns_cookie, hint.port): hint.is_open for hint in events.read()}
        for (cookie, port), is_open in newest.items():
            if uid := self._pods.get(cookie):
                self._hints.hint(uid, port, is_open=is_open)
        if (lost := events.lost()) != self._metrics.listener_events_lost:
            self._metrics.listener_events_lost = lost
            # Of any pod. Where lookups are in use, they find what has changed.
            self._scheduler.lookups.sweep()

    def _on_hint_result(self, is_open: bool, result: HintResult) -> None:
        kind = "open" if is_open else "close"
        self._metrics.listener_events.labels(kind, result.value).inc()


def _attach(directory: pathlib.Path) -> listeners.ListenerEvents:
    root = cgroup2_mount()
    if root is None:
        raise errors.AttachError("cgroup v2 is not mounted any more")
    return listeners.ListenerEvents(directory, root)

"""Listener lookups, which decide tcp probes between two connections (probes/engine/lookups.py).

Probes connect again after a change of nftables' rules in their pod. Without lookups each tcp probe
connects; results are the same.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator

import structlog

from agent.linux.procfs import raise_own
from agent.linux.rule_monitor import RuleMonitor
from agent.logs import Event
from bpf import errors, listener_lookup, pins
from probes.engine.scheduler import ProbeKey, Scheduler
from probes.netns import Netns
from probes.redirection import Acceptors

log = structlog.get_logger(__name__)


class ListenerLookups:
    """Has a scheduler use lookups while it runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        acceptors: Acceptors,
        installation: pins.Pins,
        *,
        on_lookups: Callable[[ProbeKey, list[float]], None],
        connect_every: int,
    ) -> None:
        """acceptors: of the scheduler's probes; on_lookups, connect_every: as of
        `Lookups.use`, but with 1 each probe connects."""
        self.started = asyncio.Event()
        """Set once lookups are in use."""
        self._scheduler = scheduler
        self._acceptors = acceptors
        self._installation = installation
        self._on_lookups = on_lookups
        self._connect_every = connect_every

    async def run(self) -> None:
        """Until cancelled. Raises `OSError` without a descriptor or memory."""
        if self._connect_every > 1:
            try:
                directory = await listener_lookup.load(self._installation)
                lookup = await asyncio.to_thread(_opened, directory)
            except (errors.CompileError, errors.PinError, OSError) as error:
                if isinstance(error, OSError):
                    raise_own(error)
                log.info(Event.LISTENER_LOOKUPS_UNAVAILABLE, reason=str(error))
            else:
                with contextlib.closing(lookup), self._in_use(lookup):
                    await RuleMonitor(self._doubt).run()
        await asyncio.Event().wait()

    @contextlib.contextmanager
    def _in_use(self, lookup: listener_lookup.ListenerLookup) -> Iterator[None]:
        self._scheduler.lookups.use(
            PodListeners(lookup),
            on_lookups=self._on_lookups,
            is_direct=self._acceptors.is_direct,
            connect_every=self._connect_every,
        )
        self.started.set()
        try:
            yield
        finally:
            self._scheduler.lookups.stop()

    def _doubt(self, netns_ids: Iterable[int] | None) -> None:
        """Rules have changed: in these namespaces, or somewhere."""
        if netns_ids is None:
            self._acceptors.doubt()
            self._scheduler.lookups.doubt()
            return
        changed = set(netns_ids)
        for pod in self._scheduler.targets():
            if pod.netns_id in changed:
                self._acceptors.doubt(pod.netns)
                self._scheduler.lookups.doubt(pod.uid)


class PodListeners:
    """Lookups by pods' namespaces."""

    def __init__(self, lookup: listener_lookup.ListenerLookup) -> None:
        self.look_up = lookup.look_up

    def query(self, netns: Netns, netns_id: int, address: str, port: int) -> bytes | None:
        cookie = netns.cookie()
        return None if cookie is None else listener_lookup.query(cookie, netns_id, address, port)


def _opened(directory: pathlib.Path) -> listener_lookup.ListenerLookup:
    """Tried out. Raises `OSError`."""
    lookup = listener_lookup.ListenerLookup(directory)
    try:
        lookup.try_out()
    except BaseException:
        lookup.close()
        raise
    return lookup

"""Whether a scheduler uses lookups, and what it does with them: nothing until `Lookups.use`."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from probes.engine.lookup_groups import SlotLookup
from probes.engine.lookups import ListenerTable, LookupQueue
from probes.engine.slots import Slot
from probes.engine.targets import ProbeKey
from probes.netns import Netns
from probes.results import ProbeOutcome
from probes.spec.definitions import Exec


class SlotOwner(Protocol):
    """The scheduler, as this module uses it."""

    def slots(self, uid: str | None = None) -> list[Slot]:
        """Of a pod, or of all."""

    def arm(self, slot: Slot) -> None:
        """Set the timer of the slot's next probe."""

    def trigger_slot(self, slot: Slot) -> None:
        """Connect now."""

    def fire(self, slot: Slot) -> None:
        """Connect, when there is a place for it."""

    def check_lookup(self, slot: Slot) -> None:
        """A lookup of an answered probe has found what its last connection did."""

    def guarded(self, call: Callable[..., None], *args: object) -> None:
        """Call a callback; an error stops nothing else."""


class Lookups:
    """Lookups of a scheduler's tcp probes."""

    def __init__(self, owner: SlotOwner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._queue: LookupQueue | None = None

    def use(
        self,
        table: ListenerTable,
        *,
        on_lookups: Callable[[ProbeKey, list[float]], None],
        is_direct: Callable[[Netns, str, int], bool],
        connect_every: int,
    ) -> None:
        """Decide tcp probes by lookups from now on where they can be.

        :param on_lookups: gets durations in seconds of a probe's successes by lookups, for which
            on_probe is not called: several together, all at `settle`
        :param is_direct: whether the last connection to this port was accepted by the process that
            listens there
        :param connect_every: periods; at least 2
        """
        self._queue = LookupQueue(
            *(self._loop, table),
            connect=self._owner.fire,
            on_lookups=lambda slot, seconds: self._owner.guarded(on_lookups, slot.key, seconds),
            on_passed=self._owner.check_lookup,
            is_direct=is_direct,
            connect_every=connect_every,
        )

    def stop(self) -> None:
        """Connect for each probe from now on."""
        if self._queue is not None:
            slots = self._owner.slots()
            for slot in slots:
                self.drop(slot)
            self.close()
            for slot in slots:
                self._owner.arm(slot)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def catch_up(self, slot: Slot) -> None:
        """Bring a slot's state up to date with its lookups. Before it is read or changed."""
        if slot.lookup is not None:
            slot.lookup.catch_up()

    def settle(self, uid: str | None = None) -> None:
        """Pass on what lookups have found so far: of a pod, or of all."""
        if self._queue is not None:
            for slot in self._owner.slots(uid):
                self._queue.settle(slot)

    def doubt(self, uid: str | None = None, port: int | None = None) -> None:
        """Something has changed that lookups may not see: of all pods, of one, or of one port. The
        next probes connect."""
        if self._queue is not None:
            for slot in self._owner.slots(uid):
                handler = slot.worker.probe.handler
                if port is None or isinstance(handler, Exec) or handler.port == port:
                    self._queue.doubt(slot)

    def sweep(self) -> None:
        """Look up all listeners, and trigger the probes of those that have opened or closed."""
        if self._queue is not None:
            for slot in self._queue.changed(self._owner.slots()):
                self._owner.trigger_slot(slot)

    def arm(self, slot: Slot, due: float) -> SlotLookup | None:
        """The timer of the slot's next probe, if that is a lookup."""
        if self._queue is not None and self._queue.decides(slot):
            return self._queue.add(slot, due)
        return None

    def connected(self, slot: Slot, outcome: ProbeOutcome) -> None:
        """A connection of this slot's probe has ended."""
        if self._queue is not None:
            self._queue.settle(slot)
            self._queue.connected(slot, outcome)

    def drop(self, slot: Slot) -> None:
        """Forget the slot's lookups: another container, address or port, or none any more."""
        if self._queue is not None and slot.lookup is not None:
            self._queue.settle(slot)
            if slot.timer is slot.lookup:
                slot.lookup.cancel()
                slot.timer = None
            slot.lookup = None

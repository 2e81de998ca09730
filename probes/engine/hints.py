"""Turns hints that a pod's listener has opened or closed into probes at that instant.

A hint proves nothing: it comes before the change, another listener may share the port, and a server
may be about to listen again. So the pod's list of listeners must agree, and a close must fail one
probe at once that does not count, and a second one some milliseconds later that counts.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from functools import partial

from probes import listening
from probes.engine.requests import ProbeRequest
from probes.engine.scheduler import Scheduler
from probes.listening import ListeningSocket
from probes.netns import Netns, NetnsGoneError
from probes.results import ProbeOutcome

LOOKS_SECONDS = (0.0, 0.001, 0.002, 0.004)
"""Waits before each check: the event of a close comes a moment before the listener is removed."""

SECOND_PROBE_SECONDS = 0.003
"""Long enough for a server that hands its port from one process to the next."""

QUIET_SECONDS = 0.05
"""Pause after a hint before the next of the same port is checked: a pod that opens and closes in a
loop costs 20 checks a second.
"""


class HintResult(StrEnum):
    """The result of a hint."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    """The list of listeners or the first probe did not agree."""
    IDLE = "idle"
    """No probe uses this port, or its result is the same already."""


Look = Callable[[Netns, int], list[ListeningSocket]]


class ListenerHints:
    """Checks hints, one at a time for each port of each pod; the newest wins."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_result: Callable[[bool, HintResult], None] = lambda is_open, result: None,
        look: Look = listening.listeners,
    ) -> None:
        """on_result: called with a hint (open or not) and its result."""
        self._loop = asyncio.get_running_loop()
        self._scheduler = scheduler
        self._on_hint_result = on_result
        self._look = look
        self._followed: dict[tuple[str, int], _HintCheck] = {}

    def hint(self, uid: str, port: int, *, is_open: bool) -> None:
        """A listener of this pod opens or closes."""
        self._scheduler.lookups.doubt(uid, port)
        following = self._followed.get((uid, port))
        if following is not None:
            following.next = is_open
            return
        asking = [
            asking
            for asking in self._scheduler.due_probes(uid, port)
            if asking.passes is not is_open
        ]
        if asking:
            self._followed[uid, port] = _HintCheck(self, uid, port, is_open)
            self._followed[uid, port].start(asking)
        else:
            self._on_hint_result(is_open, HintResult.IDLE)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        for key in [key for key in self._followed if key[0] == uid]:
            self._followed.pop(key).cancel()

    def close(self) -> None:
        for following in self._followed.values():
            following.cancel()
        self._followed.clear()

    def _ended(self, following: "_HintCheck", result: HintResult) -> None:
        self._on_hint_result(following.is_open, result)
        following.timer = self._loop.call_later(QUIET_SECONDS, self._rested, following)

    def _rested(self, following: "_HintCheck") -> None:
        del self._followed[following.uid, following.port]
        if following.next is not None:
            self.hint(following.uid, following.port, is_open=following.next)


class _HintCheck:
    """One hint that is being checked."""

    def __init__(self, hints: ListenerHints, uid: str, port: int, is_open: bool) -> None:
        self.uid = uid
        self.port = port
        self.is_open = is_open
        self.next: bool | None = None
        """A later hint of the same port, checked after this one."""
        self.timer: asyncio.TimerHandle | None = None
        self._hints = hints
        self._asking: list[ProbeRequest] = []
        self._runs: list[Callable[[], None]] = []
        self._left = 0
        self._failed: list[ProbeRequest] = []

    def start(self, asking: list[ProbeRequest]) -> None:
        self._asking = asking
        self._look(0)

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for cancel in self._runs:
            cancel()

    def _look(self, number: int) -> None:
        """Check the listeners until they agree with the hint, for some milliseconds."""
        if not self._agrees():
            if number + 1 == len(LOOKS_SECONDS):
                self._end(HintResult.REFUTED)
            else:
                self._later(LOOKS_SECONDS[number + 1], lambda: self._look(number + 1))
        elif self.is_open:
            for asking in self._asking:
                key = asking.key
                self._hints._scheduler.trigger(key.uid, key.container, key.type)
            self._end(HintResult.CONFIRMED)
        else:
            self._probe()

    def _agrees(self) -> bool:
        """Whether the pod's listeners agree with the hint, for at least one of the probes."""
        try:
            found = self._hints._look(self._asking[0].netns, self.port)
        except (NetnsGoneError, OSError):
            return False
        return any(
            all(
                listening.is_open(found, self.port, [candidate.address for candidate in group])
                for group in asking.plan.groups
            )
            is self.is_open
            for asking in self._asking
        )

    def _probe(self) -> None:
        """The first probe of a close, which does not count."""
        self._left = len(self._asking)
        for asking in self._asking:
            probed = partial(self._probed, asking)
            run = self._hints._scheduler.starter.start(asking.plan, asking.netns, probed)
            self._runs.append(run.cancel)

    def _probed(self, asking: ProbeRequest, outcome: ProbeOutcome) -> None:
        self._left -= 1
        if not outcome.passed and not outcome.error:
            self._failed.append(asking)
        if self._left:
            return
        if self._failed:
            self._later(SECOND_PROBE_SECONDS, self._confirm)
        else:
            self._end(HintResult.REFUTED)

    def _confirm(self) -> None:
        if not self._agrees():
            self._end(HintResult.REFUTED)
            return
        for asking in self._failed:
            self._hints._scheduler.trigger_on_close(asking.key)
        self._end(HintResult.CONFIRMED)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self.timer = self._hints._loop.call_later(seconds, step)

    def _end(self, result: HintResult) -> None:
        self._hints._ended(self, result)

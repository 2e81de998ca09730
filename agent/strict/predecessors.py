"""The relays that serve when an agent starts: its own takes over from them."""

from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from agent.logs import Event
from agent.relay import messages
from agent.relay.messages import RelayTargetSpec

log = structlog.get_logger(__name__)

_SETTLING_SECONDS = 5.0
"""From when all pods are reconciled until those to proxy are in the plan. A predecessor may have
targets that are in no plan, since their pods changed meanwhile."""

_LONGEST_SECONDS = 60.0
"""The same, if pods cannot be reconciled: new ones are not to wait for a relay any longer."""


class Predecessor(Protocol):
    """The process of a relay of another agent: `agent.strict.process.RelayProcess`."""

    @property
    def pid(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def request_release(self) -> None: ...

    async def kill(self) -> None: ...

    def release(self) -> None: ...


class Predecessors:
    """Relays of previous agents, until they have exited.

    The next relay overwrites their targets in the maps, and deletes those that it does not have. So
    it takes over only when it has all of them: no connection goes past both.
    """

    def __init__(
        self, serving: Iterable[Predecessor], *, have_these_maps: bool, now: Callable[[], float]
    ) -> None:
        """have_these_maps: whether their targets are in the maps of this version."""
        self._serving = list(serving)
        self._have_these_maps = have_these_maps
        self._now = now
        self._settled_at = now() + _LONGEST_SECONDS
        self._released: dict[Predecessor, float] = {}
        """Those that drain their connections, and when they are overdue."""

    def __bool__(self) -> bool:
        """Whether there is still anything to do."""
        return bool(self._serving or self._released)

    def note_synced(self) -> None:
        """All pods are reconciled. To be called in each pass from then on."""
        self._settled_at = min(self._settled_at, self._now() + _SETTLING_SECONDS)

    def may_be_replaced(
        self, targets: Iterable[RelayTargetSpec], published: Callable[[], set[str]]
    ) -> bool:
        """Whether a relay with these targets may take over. published: the addresses of pods to
        which connects are redirected now."""
        if not self._serving or not self._have_these_maps or self._now() >= self._settled_at:
            return True
        return published() <= {target.address for target in targets}

    def release(self, *, is_replaced: bool, is_needed: bool, is_off: bool) -> None:
        """Release them if another relay serves or none is to. To be called in each pass.

        Without these maps a replaced one continues for a while, since it has targets that are not
        planned yet; its hooks come first.
        """
        is_settled = self._now() >= self._settled_at
        is_done = is_replaced and (self._have_these_maps or is_settled)
        if is_off or is_done or (is_settled and not is_needed):
            self.release_all()

    def release_all(self) -> None:
        """Whether or not another relay serves."""
        while self._serving:
            relay = self._serving.pop()
            log.info(Event.PREVIOUS_RELAY_RELEASED, pid=relay.pid)
            relay.request_release()
            self._released[relay] = self._now() + messages.OVERDUE_SECONDS

    async def kill_overdue(self) -> None:
        """Also forget those that have exited."""
        self._serving = [relay for relay in self._serving if relay.is_running]
        for relay, overdue_at in list(self._released.items()):
            if not relay.is_running:
                del self._released[relay]
            elif self._now() >= overdue_at:
                del self._released[relay]
                await relay.kill()

    def forget(self) -> None:
        """Let all continue without this agent, too."""
        for relay in (*self._serving, *self._released):
            relay.release()
        self._serving.clear()
        self._released.clear()

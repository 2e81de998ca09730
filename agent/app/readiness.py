"""Readiness of this agent: it holds the node, and its pods are synchronised.

It is a file in a directory of the agent's own pod, for a probe that runs `test`. A probe over HTTP
may be answered by another agent: pods on the node's network share its ports. `/readyz` and
`podgate_ready` are for people and alerts.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable

import structlog

from agent import batches, tasks
from agent.errors import PodgateError
from agent.logs import Event

log = structlog.get_logger(__name__)

_FILE = "ready"
# At the tick of all others; while there is a problem, twice as often: its end may be short.
_PERIOD_SECONDS, _PROBLEM_PERIOD_SECONDS = 1.0, 0.5
# Something may remove the file.
_RENEWAL_SECONDS = 4.0

# A busy agent reads changed pods for a second. Each loss of readiness starts minReadySeconds again,
# and the DaemonSet controller may then lose its timer and never continue a roll-out (client-go,
# util/workqueue: an object that waits already keeps the earlier time).
_GRACE_SECONDS = 5.0

# 250 pods are synchronised within 15 s. A version that takes longer has failed at the take-over.
_LIMIT_SECONDS = 60.0


class TakeOverError(PodgateError):
    """The agent did not become ready after another one handed it the node."""


class Readiness:
    """Maintains the file while the agent holds the node. To be created on the running loop."""

    def __init__(
        self,
        directory: pathlib.Path | None,
        find_problem: Callable[[], str | None],
        *,
        is_take_over: bool,
    ) -> None:
        """directory: None for no file; find_problem: why the agent is not ready, or None;
        is_take_over: whether the previous agent stands by.

        An agent that hands the node over leaves the file, and it stays for a minute if the node
        comes back. The DaemonSet controller deletes an old pod that is not ready (manage in
        pkg/controller/daemon/daemon_controller.go), so no agent would be left to take the node
        back.
        """
        self._directory = directory
        self._find_problem = find_problem
        self._is_take_over = is_take_over
        self.problem = "the agent has just started"
        """Why it is not ready; empty if it is."""
        self._was_ready = False
        self._failing_since: float | None = None
        self.overdue = asyncio.Event()
        """Set if a take-over has not led to readiness: the previous agent should hold the node."""

    def reason(self) -> str | None:
        """Why the agent is not ready now, as the file will have it; None if it is."""
        return self._lasting(self._find_problem()) or None

    async def run(self) -> None:
        """Maintain the file until cancelled."""
        now = asyncio.get_running_loop().time
        deadline = now() + _LIMIT_SECONDS
        written: Callable[[pathlib.Path | None], None] | None = None
        renewed_at = 0.0
        while True:
            is_late = now() >= deadline
            problem = self._find_problem()
            if problem is None:
                self._failing_since = None
            elif self._failing_since is None:
                self._failing_since = now()
            self._log(self._lasting(problem))
            write = None
            if not self.problem:
                write = create
            elif self._was_ready or is_late:
                write = remove
            if write and (write is not written or now() >= renewed_at + _RENEWAL_SECONDS):
                renewed_at = now()
                await batches.in_thread(write, self._directory)
                written = write
            if is_late and self._is_take_over and not self._was_ready:
                self.overdue.set()
            is_failing = self._failing_since is not None
            await tasks.tick(_PROBLEM_PERIOD_SECONDS if is_failing else _PERIOD_SECONDS)

    def _lasting(self, problem: str | None) -> str:
        """The problem, but the previous one for the first seconds of a ready agent's; empty for
        None."""
        now = asyncio.get_running_loop().time()
        is_new = self._failing_since is None or now - self._failing_since < _GRACE_SECONDS
        return self.problem if problem and self._was_ready and is_new else problem or ""

    def check_take_over(self) -> None:
        """Raise `TakeOverError` if it is overdue."""
        if self.overdue.is_set():
            raise TakeOverError(
                f"the take-over failed, since the agent is not ready: {self.problem}; the previous "
                "agent takes the node back."
            )

    def _log(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if not problem:
            self._was_ready = True
            log.info(Event.AGENT_READY)
        elif self._was_ready:
            log.warning(Event.AGENT_NOT_READY, reason=problem)
        else:
            log.info(Event.AGENT_NOT_READY, reason=problem)


def create(directory: pathlib.Path | None) -> None:
    """Raises `OSError`."""
    if directory is not None:
        (directory / _FILE).touch()


def remove(directory: pathlib.Path | None) -> None:
    """Remove the file, also that of a killed agent: it outlives a container. Raises `OSError`."""
    if directory is not None:
        with contextlib.suppress(FileNotFoundError):
            (directory / _FILE).unlink()

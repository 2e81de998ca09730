"""Readiness of this agent: it holds the node, and its pods are synchronised.

It is a file in a directory of the agent's own pod, for a probe that runs `test`. A probe over HTTP
may be answered by another agent: pods on the node's network share its ports.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable

import structlog

from agent.errors import PodgateError
from agent.logs import Event

log = structlog.get_logger(__name__)

_FILE = "ready"
_PERIOD_SECONDS = 0.5

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
        is_take_over: whether the previous agent stands by."""
        self._directory = directory
        self._find_problem = find_problem
        self._is_take_over = is_take_over
        self.problem = "the agent has just started"
        """Why it is not ready; empty if it is."""
        self._was_ready = False
        self.overdue = asyncio.Event()
        """Set if a take-over has not led to readiness: the previous agent should hold the node."""

    async def run(self) -> None:
        """Maintain the file until cancelled, and remove it then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LIMIT_SECONDS if self._is_take_over else None
        try:
            while True:
                await self._set(self._find_problem() or "")
                if not self.problem:
                    deadline = None
                elif deadline is not None and loop.time() >= deadline:
                    self.overdue.set()
                await asyncio.sleep(_PERIOD_SECONDS)
        finally:
            await asyncio.to_thread(remove, self._directory)

    def check_take_over(self) -> None:
        """Raise `TakeOverError` if it is overdue."""
        if self.overdue.is_set():
            raise TakeOverError(
                f"the take-over failed, since the agent is not ready: {self.problem}; the previous "
                "agent takes the node back."
            )

    async def _set(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem:
            record = log.warning if self._was_ready else log.info
            record(Event.AGENT_NOT_READY, reason=problem)
            await asyncio.to_thread(remove, self._directory)
        else:
            self._was_ready = True
            log.info(Event.AGENT_READY)
            if self._directory is not None:
                await asyncio.to_thread((self._directory / _FILE).touch)


def remove(directory: pathlib.Path | None) -> None:
    """Remove the file, also that of a killed agent: it outlives a container. Raises `OSError`."""
    if directory is not None:
        with contextlib.suppress(FileNotFoundError):
            (directory / _FILE).unlink()

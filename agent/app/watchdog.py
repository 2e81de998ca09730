"""Ends an agent that hangs, so that its pod is started again and another agent takes the node.

It replaces a liveness probe: pods on the node's network share its ports, so one over HTTP is
answered by whichever agent holds the node, and each exec probe starts processes in the container.
The timer is a thread of faulthandler in C, which needs neither the event loop nor the interpreter's
lock; it prints what all threads are doing.
"""

import faulthandler
from collections.abc import Callable

from agent import tasks

_PERIOD_SECONDS = 5.0


def beat(limit_seconds: float) -> None:
    """End this process with status 1 unless it beats again within this time. 0: never."""
    if limit_seconds:
        faulthandler.dump_traceback_later(limit_seconds, exit=True)


async def run(limit_seconds: float, find_problem: Callable[[], str | None]) -> None:
    """Beat until cancelled while the event loop runs and `find_problem` returns None."""
    while True:
        if find_problem() is None:
            beat(limit_seconds)
        await tasks.tick(_PERIOD_SECONDS)


def stop() -> None:
    """End nothing any more."""
    faulthandler.cancel_dump_traceback_later()

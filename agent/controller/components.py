"""The controller's components: small, level-triggered, and each the one writer of something.

A component is a coroutine function that runs until cancelled. It starts when this process becomes
the leader, without state of previous terms: it lists what exists and brings about what is desired.
It handles errors of the API server by itself; any other exception ends the process, and another
replica takes over.
"""

from collections.abc import Awaitable, Callable, Iterator

from agent.controller.leader_client import LeaderClient
from agent.controller.policies import HOST_EGRESS, PolicyStatusWriter

Run = Callable[[], Awaitable[None]]


def components(api: LeaderClient) -> Iterator[tuple[str, Run]]:
    """All components by name, made for one term of leadership. api: writes while it lasts."""
    yield "policy status", PolicyStatusWriter(api).run
    yield "egress policy status", PolicyStatusWriter(api, kind=HOST_EGRESS).run

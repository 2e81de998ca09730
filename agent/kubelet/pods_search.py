"""Follows where the pods of this node have their cgroups."""

import asyncio
from collections.abc import Callable, Collection

import structlog

from agent import tasks
from agent.linux.pods_cgroup import PodsCgroup
from agent.logs import Event

log = structlog.get_logger(__name__)

# A pod that is known may have its first process some seconds later.
_PERIOD_SECONDS = 2.0
# A pass over 8,192 processes takes 0.1 s of a thread: on a node whose pods have no cgroup v2, as
# with a kubelet on version 1, that is one of 3,000.
_LONG_PERIOD_SECONDS = 300.0
_SHORT_TRIES = 15


class PodsSearch:
    """Searches until a process of a known pod has shown it, and again once it is gone."""

    def __init__(
        self,
        pods_cgroup: PodsCgroup,
        uids: Callable[[], Collection[str]],
        *,
        on_found: Callable[[], None],
    ) -> None:
        """uids: of the pods that are known now; on_found: called on the loop if it is another one
        than before."""
        self._pods_cgroup = pods_cgroup
        self._uids = uids
        self._on_found = on_found

    async def run(self) -> None:
        """Search until cancelled. Raises `OSError` as `PodsCgroup.search`."""
        tries = 0
        while True:
            uids = frozenset(self._uids())
            if uids and self._pods_cgroup.confirmed is None:
                tries += 1
                if await asyncio.to_thread(self._pods_cgroup.search, uids):
                    tries = 0
                    log.info(Event.PODS_CGROUP_FOUND, path=str(self._pods_cgroup.confirmed))
                    self._on_found()
            is_long = tries > _SHORT_TRIES
            await tasks.tick(_LONG_PERIOD_SECONDS if is_long else _PERIOD_SECONDS)

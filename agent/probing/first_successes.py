"""When a probe of a container succeeds for the first time, seconds after the container's start.

The kubelet has no such figure (kubernetes#96411). It is the time that the application takes to
start, and up to one period of the probe.
"""

import time
from collections.abc import Callable

from agent.pods.container_runs import ContainerRun
from probes.engine.scheduler import ProbeKey


class FirstSuccesses:
    """By probe. Of containers that started while this agent ran: of others it may have missed the
    first success."""

    def __init__(
        self, observe: Callable[[str, float], object], now: Callable[[], float] = time.time
    ) -> None:
        """observe: gets the probe's type and the seconds; now: Unix time."""
        self._observe = observe
        self._now = now
        self._began_at = now()
        self._succeeded: dict[str, dict[ProbeKey, str]] = {}
        """By pod's uid: ids of the containers whose first success was seen."""

    def passed(self, key: ProbeKey, container: ContainerRun | None) -> None:
        """A probe has succeeded. container: that it belongs to; None if no runtime knows it."""
        if container is None or container.started_at < self._began_at:
            return
        of_pod = self._succeeded.setdefault(key.uid, {})
        if of_pod.get(key) == container.id:
            return
        of_pod[key] = container.id
        # The runtime's clock may have been set in between.
        self._observe(key.type.value, max(0.0, self._now() - container.started_at))

    def forget(self, uid: str) -> None:
        """Of a removed pod."""
        self._succeeded.pop(uid, None)

"""When a probe of a container succeeds for the first time, seconds after the container's start.

The kubelet has no such figure (kubernetes#96411). It is the time that the application takes to
start, and up to one period of the probe.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping

from agent.pods.container_runs import ContainerRun
from probes.engine.scheduler import ProbeKey
from probes.engine.workers import ProbeType


@dataclasses.dataclass(slots=True)
class _Container:
    run: ContainerRun
    succeeded: set[ProbeType] = dataclasses.field(default_factory=set)


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
        self._by_pod: dict[str, dict[str, _Container]] = {}
        """Containers by pod's uid and name."""

    def set_containers(self, uid: str, runs: Mapping[str, ContainerRun]) -> None:
        """A pod's containers as they run now. One with another id was restarted."""
        before = self._by_pod.get(uid, {})
        self._by_pod[uid] = {
            name: found
            if (found := before.get(name)) and found.run.id == run.id
            else _Container(run)
            for name, run in runs.items()
            if run.started_at >= self._began_at
        }

    def passed(self, key: ProbeKey) -> None:
        """A probe has succeeded."""
        container = self._by_pod.get(key.uid, {}).get(key.container)
        if container is None or key.type in container.succeeded:
            return
        container.succeeded.add(key.type)
        # The runtime's clock may have been set in between.
        self._observe(key.type.value, max(0.0, self._now() - container.run.started_at))

    def forget(self, uid: str) -> None:
        """Of a removed pod."""
        self._by_pod.pop(uid, None)

"""Events of pods, on their way from where they happen to the API server."""

import asyncio
import collections
import dataclasses

from probes.spec.specs import PodSpec

# In a cluster they are taken at once; without one nothing takes them.
_MAX_WAITING = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class PodEvent:
    """One event. uid: the pod's, None for one about the node or a namespace; action: what podgate
    was doing; container: its name, where it concerns one; namespace: likewise; about: what
    distinguishes it from other events with this reason, of a pod; is_warning: else Normal, of a
    pod."""

    uid: str | None
    reason: str
    message: str
    action: str
    container: str = ""
    namespace: str = ""
    about: str = ""
    is_warning: bool = True


class PodEvents:
    """A bounded queue: the oldest events are discarded first."""

    def __init__(self) -> None:
        self._waiting: collections.deque[PodEvent] = collections.deque(maxlen=_MAX_WAITING)
        self._recorded = asyncio.Event()

    def record(self, event: PodEvent) -> None:
        self._waiting.append(event)
        self._recorded.set()

    async def next(self) -> list[PodEvent]:
        """All events that wait, as soon as there is one."""
        await self._recorded.wait()
        self._recorded.clear()
        events = list(self._waiting)
        self._waiting.clear()
        return events


def kubelet_reports(spec: PodSpec, container: str, probe: str) -> bool:
    """Whether the kubelet runs the same probe as podgate, and so reports its failures.

    probe: "startup", "readiness" or "liveness".
    """
    running = next((found for found in spec.containers if found.name == container), None)
    base = next((found for found in spec.base if found.name == container), None)
    if running is None or base is None:
        return False
    return getattr(running, probe) is not None and getattr(running, probe) == getattr(base, probe)

"""Probes that dial a port of a pod, for what follows listeners."""

from collections.abc import Iterable

import msgspec

from probes.engine import prober
from probes.engine.slots import Slot
from probes.engine.targets import ProbeKey
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeResult
from probes.spec.definitions import Exec


class ProbeRequest(msgspec.Struct, frozen=True):
    """A probe that dials a given port."""

    key: ProbeKey
    plan: prober.ProbePlan
    netns: Netns
    passes: bool
    """Whether the result that counts is success."""


def of_port(slots: Iterable[Slot], port: int) -> list[ProbeRequest]:
    """The startup and readiness probes among these that dial the port."""
    return [
        ProbeRequest(slot.key, slot.plan, slot.netns, slot.worker.cached is ProbeResult.SUCCESS)
        for slot in slots
        if slot.key.type is not ProbeType.LIVENESS
        and not isinstance(slot.worker.probe.handler, Exec)
        and slot.worker.probe.handler.port == port
    ]

"""Single results of answered probes: the newest one is what the kubelet's own probe gets."""

import time

import msgspec

from probes.engine.slots import Slot
from probes.engine.targets import ProbeKey
from probes.results import ProbeOutcome


class Check(msgspec.Struct, frozen=True):
    """One finished check of an answered probe: its result, before thresholds."""

    key: ProbeKey
    container_id: str
    outcome: ProbeOutcome
    finished_ns: int
    """On CLOCK_BOOTTIME, in nanoseconds."""
    valid_seconds: float
    """How long after its end it may be used: period and timeout. The next check has finished by
    then, also where each takes its whole timeout."""


def check_of(slot: Slot, outcome: ProbeOutcome, finished_ns: int) -> Check:
    """The run of this slot that has just finished."""
    worker = slot.worker
    valid = worker.probe.period_seconds + worker.probe.timeout_seconds
    return Check(slot.key, worker.container_id, outcome, finished_ns, valid)


def boot_clock_ns() -> int:
    """Nanoseconds since the boot: no step of the wall clock moves it, and it includes suspends."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

"""Single results of answered probes: the newest one is what the kubelet's own probe gets."""

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
    """On CLOCK_BOOTTIME, in nanoseconds; a timeout after its start at the latest. A response that
    waited for this process, which was stopped or suspended, is no newer for that."""
    valid_seconds: float
    """How long after its end it may be used: period and timeout. The next check has finished by
    then, also where each takes its whole timeout."""


def check_of(slot: Slot, outcome: ProbeOutcome, now_ns: int) -> Check:
    """The run of this slot that has just finished."""
    worker = slot.worker
    probe = worker.probe
    latest_ns = slot.started_ns + round(probe.timeout_seconds * 1e9)
    valid = probe.period_seconds + probe.timeout_seconds
    return Check(slot.key, worker.container_id, outcome, min(now_ns, latest_ns), valid)

"""When one probe runs, and which results count: pkg/kubelet/prober/worker.go without a clock.

A worker gets the time and the container's state, and computes when its probe is due. It does no I/O
and has no timers, so a day of probing is tested in milliseconds.
"""

import math
from enum import StrEnum

import msgspec

from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import Probe

TRIES_MAX = 3
"""Attempts of one probe while the prober itself fails (prober.go maxProbeRetries)."""


class ProbeType(StrEnum):
    """The three probes, spelt as in the kubelet's metrics and Events."""

    STARTUP = "Startup"
    READINESS = "Readiness"
    LIVENESS = "Liveness"


INITIAL_RESULTS = {
    ProbeType.STARTUP: ProbeResult.UNKNOWN,
    ProbeType.READINESS: ProbeResult.FAILURE,
    ProbeType.LIVENESS: ProbeResult.SUCCESS,
}
"""The results that count until the first threshold is reached (worker.go newWorker)."""


class ContainerInstance(msgspec.Struct, frozen=True):
    """A container's state at one moment."""

    container_id: str
    started_at: float
    """On the clock of `now`, in seconds."""
    running: bool = True
    restarts: bool = True
    """Whether it will be restarted when it exits (restartPolicy)."""


class Worker:
    """The state of one probe of one container.

    Results count only in a row: `success_threshold` or `failure_threshold` equal results in a row
    change `cached`, fewer leave it unchanged.
    """

    __slots__ = (
        "_closed",
        "_ended_at",
        "_gated",
        "_has_run",
        "_retrying",
        "_running",
        "_started_at",
        "_tick",
        "_tries",
        "cached",
        "container_id",
        "in_flight",
        "is_paused",
        "over",
        "probe",
        "run_result",
        "streak",
        "type",
    )

    def __init__(self, type: ProbeType, probe: Probe, *, first_at: float) -> None:
        self.type = type
        self.probe = probe
        self.cached: ProbeResult | None = None
        """The result that counts; None before a container is known."""
        self.container_id = ""
        self.in_flight = False
        self.is_paused = False
        """No more probes of this container: it will be restarted, or has started."""
        self.over = False
        """No more probes at all."""
        self.run_result: ProbeResult | None = None
        self.streak = 0
        self._closed = False
        self._ended_at = 0.0
        self._tick = first_at
        self._started_at = 0.0
        self._running = False
        self._gated = False
        self._has_run = False
        self._tries = 0
        self._retrying = False

    @property
    def due(self) -> float | None:
        """When the next probe is due; None if none is scheduled."""
        if self.over or self.in_flight or self.is_paused or self._gated or not self._running:
            return None
        return self._tick if self._has_run else max(self._tick, self._delayed)

    @property
    def _delayed(self) -> float:
        # worker.go compares whole seconds since the start with whole seconds of delay; that is
        # the same as comparing times, and goes below the second.
        return self._started_at + self.probe.initial_delay_seconds

    def observe(
        self,
        container: ContainerInstance | None,
        *,
        started: bool,
        deleting: bool,
        now: float,
        restored: ProbeResult | None = None,
    ) -> None:
        """Update the container's state (the first half of worker.go doProbe).

        `started`: its startup probe has succeeded, or it has none. `restored`: a result from before
        this process, used instead of the initial one: restarting the prober must not make a pod
        unready (worker.go, gate ChangeContainerStatusOnKubeletRestart).
        """
        if self.over or container is None or not container.container_id:
            return
        is_first = not self.container_id
        is_new = container.container_id != self.container_id
        if is_new:
            self.container_id = container.container_id
            self.cached = restored or INITIAL_RESULTS[self.type]
            self.is_paused = False
            self._closed = False
            self._has_run = False
        if self.is_paused:
            return
        was_waiting = self._gated or not self._running
        self._started_at = container.started_at
        self._running = container.running
        if not container.running:
            self.cached = ProbeResult.FAILURE
            self.over = not container.restarts
            return
        if deleting and self.type is not ProbeType.READINESS:
            # "Set a last result to ensure quiet shutdown." Readiness probes continue.
            self.cached = ProbeResult.SUCCESS
            self.over = True
            return
        self._gated = started if self.type is ProbeType.STARTUP else not started
        if self._gated or not (is_new or was_waiting):
            return
        if self.type is ProbeType.LIVENESS:
            if self._tick < now:
                self._skip_missed_ticks(now)
        elif self._tick < now or not is_first:
            # The kubelet triggers readiness as soon as it sees the container run; startup, on
            # which readiness waits, is no worse served. Only liveness keeps its rhythm.
            self._tick = now

    def change(self, probe: Probe, now: float) -> None:
        """Take another configuration for the same container (KEP-6318, "Kubelet Behavior").

        The result that counts stays, whatever has changed. Other thresholds begin a new count.
        Another period counts from the end of the newest probe, or from the start of one that runs.
        What another attempt differs in (its handler, timeout, addresses, whether it answers) begins
        a new count and is tried at once; the caller abandons the attempt that runs.
        """
        old, self.probe = self.probe, probe
        is_other_attempt = not is_same_attempt(old, probe)
        if is_other_attempt or _thresholds(old) != _thresholds(probe):
            self.run_result, self.streak = None, 0
        if is_other_attempt:
            self._closed = False
            self._tick = now
        elif self._has_run and probe.period_seconds != old.period_seconds:
            newest = self._tick - old.period_seconds if self.in_flight else self._ended_at
            self._tick = max(newest + probe.period_seconds, now)
        if old.answered is not probe.answered:
            has_started = self.type is ProbeType.STARTUP and self.cached is ProbeResult.SUCCESS
            self.is_paused = has_started and not probe.answered

    def trigger(self, now: float) -> None:
        """Probe now, and then every period from now (worker.go manualTriggerCh).

        During a probe: once more, right after it.
        """
        self._tick = min(self._tick, now) if self.in_flight else now

    def trigger_on_close(self, now: float) -> None:
        """Probe now, since the listener is closed.

        If that probe fails, it counts as `failure_threshold` failures for a probe with
        `fail_when_listener_closes`, otherwise as one.
        """
        self._closed = self.probe.fail_when_listener_closes
        self.trigger(now)

    def start(self, now: float) -> None:
        """Mark the probe as started; missed ticks are dropped, the rhythm stays."""
        self.in_flight = True
        self._tries += 1
        if not self._retrying:
            if not self._has_run:
                self._tick = max(self._tick, self._delayed)
            self._skip_missed_ticks(now)
        self._has_run = True
        self._retrying = False

    def skip_tick(self, now: float) -> None:
        """The probe of the next tick, which may be a little later than now, starts now."""
        self._tick += self.probe.period_seconds
        self._skip_missed_ticks(now)

    def repeat_success(self, count: int, seconds: float) -> float:
        """`count` probes have passed as the one before, in the ticks of `seconds`; when the next
        one is due."""
        self.streak += count
        self._tick += seconds
        self._ended_at = self._tick - self.probe.period_seconds
        return self._tick

    def finish(self, outcome: ProbeOutcome, now: float) -> bool:
        """Record the outcome of the probe that ends now.

        True if the same probe must be started again at once.

        An outcome with `error` is tried three times in all and then discarded: the prober failed,
        and the container's state is unknown. One that shows nothing is discarded at once.
        """
        self.in_flight = False
        self._ended_at = now
        is_retried = outcome.error and not outcome.shows_nothing
        if is_retried and self._tries < TRIES_MAX and self.due is not None:
            self._retrying = True
            return True
        self._tries = 0
        if not outcome.error and not self.over:
            self._count(outcome.result.counted())
        return False

    def abandon(self) -> None:
        """Mark the probe as stopped without an outcome."""
        self.in_flight = False
        self._retrying = False
        self._tries = 0

    def _count(self, result: ProbeResult) -> None:
        if self.type is ProbeType.STARTUP and self.cached is ProbeResult.SUCCESS:
            return  # It has started; further results only answer the kubelet.
        if result is self.run_result:
            self.streak += 1
        else:
            self.run_result, self.streak = result, 1
        threshold = (
            self.probe.failure_threshold
            if result is ProbeResult.FAILURE
            else self.probe.success_threshold
        )
        if self._closed and result is ProbeResult.FAILURE:
            self.streak = max(self.streak, threshold)
        self._closed = False
        if self.streak < threshold:
            return
        self.cached = result
        if self.probe.answered:
            return  # The kubelet decides, and needs the results that follow.
        if self.type is ProbeType.STARTUP or (
            self.type is ProbeType.LIVENESS and result is ProbeResult.FAILURE
        ):
            # The container will be restarted, or has started: wait for a new container id.
            self.is_paused = True
            self.streak = 0

    def _skip_missed_ticks(self, now: float) -> None:
        period = self.probe.period_seconds
        if self._tick <= now:
            self._tick += period * (math.floor((now - self._tick) / period) + 1)
            if self._tick <= now:  # the sum was rounded down
                self._tick += period


def is_same_attempt(one: Probe, other: Probe) -> bool:
    """Whether they differ in nothing but when attempts are made, and what results mean."""
    return _attempt(one) == _attempt(other)


def _thresholds(probe: Probe) -> tuple[int, int]:
    return probe.success_threshold, probe.failure_threshold


def _attempt(probe: Probe) -> Probe:
    return msgspec.structs.replace(
        probe,
        initial_delay_seconds=0.0,
        period_seconds=0.0,
        success_threshold=0,
        failure_threshold=0,
        termination_grace_period_seconds=None,
        fail_when_listener_closes=False,
    )

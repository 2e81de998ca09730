"""A scheduler with fake pods and fake time, for tests of what it does and when."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from probes.engine import prober, scheduler
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeOutcome, ProbeResult
from probes.spec import specs

STARTUP, READINESS, LIVENESS = ProbeType.STARTUP, ProbeType.READINESS, ProbeType.LIVENESS
GOOD, BAD = ProbeOutcome(ProbeResult.SUCCESS, "fine"), ProbeOutcome(ProbeResult.FAILURE, "ill")
ERROR = ProbeOutcome(ProbeResult.UNKNOWN, "no socket", error=True)
NETNS = Netns("/run/netns/none", 0, 0)


@dataclasses.dataclass
class Started:
    """One probe that the scheduler started."""

    at: float
    port: int
    netns: Netns
    addresses: list[str]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Pods:
    """Stand-in for the prober and all pods: answers by port, after the delay that the test sets."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: dict[int, ProbeOutcome | Exception] = {}
        self.takes: dict[int, float] = {}
        self.started: list[Started] = []
        self.closed = False

    def start(
        self, plan: prober.ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None], /
    ) -> Started:
        port = plan.candidates[0].target.exchange().hop.port if plan.candidates else 0
        addresses = [candidate.address for candidate in plan.candidates]
        run = Started(self.loop.time(), port, netns, addresses)
        self.started.append(run)
        answer = self.answers.get(port, GOOD)
        if isinstance(answer, Exception):
            raise answer
        if seconds := self.takes.get(port):
            self.loop.call_later(seconds, self._answer, run, answer, done)
        else:
            done(answer)
        return run

    def _answer(
        self, run: Started, answer: ProbeOutcome, done: Callable[[ProbeOutcome], None]
    ) -> None:
        if not run.cancelled:
            done(answer)

    def close(self) -> None:
        self.closed = True

    def times(self, port: int) -> list[float]:
        return [round(run.at, 6) for run in self.started if run.port == port]


class Bench:
    """A scheduler, the pods it probes, and its reports."""

    def __init__(self, **settings: float) -> None:
        self.pods = Pods()
        self.results: list[tuple[str, str, ProbeResult]] = []
        self.probes: list[tuple[str, ProbeOutcome]] = []
        self.suspended_seconds = 0.0
        """Time that passed without the event loop's clock."""
        self.stepped_seconds = 0.0
        """By how much the wall clock was set."""
        self.checks: list[scheduler.Check] = []
        self.delays: list[float] = []
        self.scheduler = scheduler.Scheduler(
            on_result=lambda key, result: self.results.append((key.uid, key.type, result)),
            on_probe=lambda key, outcome: self.probes.append((key.uid, outcome)),
            on_check=self.checks.append,
            on_delay=self.delays.append,
            starter=self.pods,
            wall_clock=self._wall_clock,
            boot_clock_ns=self._boot_clock_ns,
            max_in_flight=int(settings.pop("max_in_flight", 100)),
            **settings,
        )

    def _wall_clock(self) -> float:
        return asyncio.get_running_loop().time() + self.stepped_seconds

    def _boot_clock_ns(self) -> int:
        return round((asyncio.get_running_loop().time() + self.suspended_seconds) * 1e9)

    def status(self, uid: str, type: ProbeType = READINESS) -> scheduler.ProbeState:
        (found,) = (s for s in self.scheduler.snapshot() if s.key.uid == uid and s.key.type == type)
        return found


def probe(port: int, *, period: float = 10.0, success: int = 1, failure: int = 3) -> specs.Probe:
    return specs.Probe(specs.TcpSocket(port), 0.0, 1.0, period, success, failure)


def pod(
    uid: str = "a",
    *,
    readiness: specs.Probe | None = None,
    liveness: specs.Probe | None = None,
    startup: specs.Probe | None = None,
    container_id: str = "c1",
    started_at: float = 0.0,
    running: bool = True,
    started: bool | None = None,
    deleting: bool = False,
    restored: Mapping[ProbeType, ProbeResult] | None = None,
    netns: Netns = NETNS,
    addresses: tuple[str, ...] = ("198.18.0.1",),
) -> scheduler.ProbedPod:
    probes = specs.ContainerProbes("app", startup, readiness, liveness)
    container = scheduler.ProbedContainer(
        probes,
        container_id,
        started_at,
        running=running,
        started=started,
        restored=restored or {},
    )
    return scheduler.ProbedPod(uid, netns, addresses, (container,), deleting)

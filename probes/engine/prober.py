"""One probe: a handler, the pod's addresses, one deadline, one outcome.

With several addresses this is Happy Eyeballs (RFC 8305): the first is tried alone, the next joins
when it fails or has not answered for a while, and one success is enough. So a healthy pod sees one
request per probe, not one per family. Where a probe names a dual-stack policy, each family is a run
of its own, and all of them must pass.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from probes.engine import families, joint
from probes.engine.alarms import Alarms
from probes.netns import Netns
from probes.protocols import client_certificates
from probes.protocols.client_certificates import (
    NO_CERTIFICATES,
    CertificateError,
    Certificates,
    ClientCertificate,
)
from probes.protocols.dialing import DialAttempt, LoopPoller
from probes.protocols.exchanges import ExchangeTarget
from probes.redirection import Acceptors
from probes.results import ExchangeResult, ProbeOutcome, ProbeResult
from probes.spec import handlers
from probes.spec.definitions import Probe

ATTEMPT_DELAY_SECONDS = 0.25
"""How long one address may be silent before the next joins (RFC 8305 section 5)."""


class DialCandidate(msgspec.Struct, frozen=True):
    """One address to dial, and the handler prepared for it."""

    family: int
    address: str
    target: ExchangeTarget


class ProbePlan(msgspec.Struct, frozen=True):
    """The part of a probe that is the same in every run."""

    groups: tuple[tuple[DialCandidate, ...], ...]
    """One candidate of each group must pass; no group: no address."""
    timeout_seconds: float
    attempt_delay_seconds: float
    rejection: str = ""
    """Why there is no address to dial."""
    is_unknown: bool = False
    """Whether that proves nothing about the pod, so that it is no verdict."""
    certificate: ClientCertificate | None = None
    """That of the client, which may expire."""
    certificate_problem: str = ""
    """Why there is none, though the probe names one."""

    def has_certificate_of(self, other: "ProbePlan") -> bool:
        """Whether both show the same certificate, or lack it for the same reason."""
        is_same = self.certificate is other.certificate
        return is_same and self.certificate_problem == other.certificate_problem

    @property
    def candidates(self) -> tuple[DialCandidate, ...]:
        """All of them, in dialling order."""
        return tuple(candidate for group in self.groups for candidate in group)


def plan(
    probe: Probe,
    addresses: Sequence[str],
    interfaces: families.PodInterfaces = families.NO_INTERFACES,
    certificates: Certificates = NO_CERTIFICATES,
) -> ProbePlan:
    """Prepare `probe` for the pod's `addresses`, the preferred one first.

    Raises ValueError for an exec handler, for what is no address and for a timeout that is not
    positive.
    """
    handler, timeout = probe.handler, probe.timeout_seconds
    target = handlers.kind_of(handler).target
    if target is None:
        raise ValueError(f"{handler} probes are run by the kubelet, never by podgate")
    if not timeout > 0:
        raise ValueError(f"a probe's timeout must be positive, not {timeout}")
    try:
        handler = client_certificates.identified(handler, certificates)
        groups = families.groups(probe, addresses, interfaces)
    except CertificateError as error:
        return ProbePlan((), timeout, timeout, certificate_problem=str(error))
    except families.NoAddressError as error:
        return ProbePlan((), timeout, timeout, str(error))
    except families.UnknownNetworkError as error:
        return ProbePlan((), timeout, timeout, str(error), is_unknown=True)
    # Each address is to have half of the time at least, however short that is.
    share = timeout / 2 / max(1, max(len(group) for group in groups) - 1)
    return ProbePlan(
        tuple(
            tuple(candidate_for(address, target(handler, address, timeout)) for address in group)
            for group in groups
        ),
        timeout,
        min(ATTEMPT_DELAY_SECONDS, share),
        certificate=client_certificates.certificate_of(handler),
    )


def candidate_for(address: str, target: ExchangeTarget) -> DialCandidate:
    """Raises ValueError for what is no address."""
    family = socket.AF_INET6 if families.family_of(address) == "IPv6" else socket.AF_INET
    return DialCandidate(int(family), address, target)


class Starter(Protocol):
    """Starts probes: `Prober`, or a test's stand-in."""

    def start(
        self, plan: ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None], /
    ) -> joint.Cancellable: ...

    def close(self) -> None: ...


class Prober:
    """Runs plans on one event loop; it belongs to the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, acceptors: Acceptors | None = None) -> None:
        """acceptors: what is known of who accepts, for several probers or other readers."""
        self.loop = loop
        self.poller = LoopPoller(loop)
        self.alarms = Alarms(loop)
        self.acceptors = acceptors or Acceptors(loop.time)

    def start(
        self, plan: ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None]
    ) -> "ProbeRun | joint.JointRun":
        """Run `plan` once in `netns`; `done` is called once, maybe before this returns."""
        if len(plan.groups) > 1:
            parts = [msgspec.structs.replace(plan, groups=(group,)) for group in plan.groups]
            together = joint.JointRun(len(parts), done)
            for number, part in enumerate(parts):
                together.add(self.start(part, netns, together.ender(number)))
            return together
        if plan.certificate is not None and (problem := plan.certificate.problem()):
            plan = msgspec.structs.replace(plan, groups=(), certificate_problem=problem)
        run = ProbeRun(self, plan, netns, done)
        run.start()
        return run

    def close(self) -> None:
        """Close the epoll; no run may be active."""
        self.alarms.close()
        self.poller.close()


class ProbeRun:
    """One run of a plan: at most one attempt per address, all over at the deadline."""

    __slots__ = (
        "_active",
        "_candidates",
        "_done",
        "_failed",
        "_netns",
        "_plan",
        "_prober",
        "_started",
        "_starting",
        "over",
    )

    def __init__(
        self, prober: Prober, plan: ProbePlan, netns: Netns, done: Callable[[ProbeOutcome], None]
    ) -> None:
        self.over = False
        self._prober = prober
        self._plan = plan
        self._netns = netns
        self._done = done
        self._started = prober.loop.time()
        self._active: list[DialAttempt] = []
        self._failed: list[DialAttempt] = []
        self._starting = False
        self._candidates = plan.groups[0] if plan.groups else ()
        """Those that are still to be dialled."""

    def start(self) -> None:
        self._advance()
        if not self.over:
            self._wait()

    def cancel(self) -> None:
        """Stop at once; `done` is not called."""
        if not self.over:
            self._stop()

    def wake(self) -> None:
        """The time is over, or the addresses being dialled have been silent for long enough."""
        if self.over:
            return
        if self._prober.loop.time() >= self._started + self._plan.timeout_seconds:
            self._expire()
            return
        self._advance()
        if not self.over:
            self._wait()

    def _wait(self) -> None:
        """Be woken for the next address, or at the deadline."""
        at = self._started + self._plan.timeout_seconds
        if self._candidates:
            at = min(at, self._prober.loop.time() + self._plan.attempt_delay_seconds)
        self._prober.alarms.set(self, at)

    def _advance(self) -> None:
        """Start the next address, and those after it while they fail at once."""
        self._starting = True
        while self._candidates and not self.over:
            candidate, self._candidates = self._candidates[0], self._candidates[1:]
            attempt = DialAttempt(
                candidate.target.exchange(),
                netns=self._netns,
                family=candidate.family,
                address=candidate.address,
                poller=self._prober.poller,
                acceptors=self._prober.acceptors,
                done=self._ended,
            )
            self._active.append(attempt)
            attempt.start()
            if attempt.verdict is None:
                break
        self._starting = False
        if not self._active and not self.over:
            self._finish(self._failure())

    def _ended(self, attempt: DialAttempt) -> None:
        self._active.remove(attempt)
        verdict = attempt.verdict
        assert verdict is not None
        if self.over:
            return
        if verdict.result.passed:
            self._finish(self._outcome(verdict, attempt.address))
            return
        self._failed.append(attempt)
        if not self._starting:
            self._advance()

    def _expire(self) -> None:
        self._candidates = ()
        for attempt in tuple(self._active):
            attempt.expire()
        if not self.over:
            self._finish(self._failure())

    def _failure(self) -> ProbeOutcome:
        """The joint outcome of all addresses; the first one's message comes first."""
        if self._plan.certificate_problem:
            unusable = client_certificates.unusable(self._plan.certificate_problem)
            return self._outcome(unusable, None)
        if not self._failed:
            return self._outcome(ExchangeResult(ProbeResult.FAILURE, self._plan.rejection), None)
        order = [candidate.address for candidate in self._plan.groups[0]]
        failed = sorted(self._failed, key=lambda attempt: order.index(attempt.address))
        verdicts = [attempt.verdict for attempt in failed if attempt.verdict is not None]
        # The application may be at the address whose connection did not get to it. Else a failure
        # of the pod takes precedence over a prober error with another address.
        real = [one for one in verdicts if one.is_redirected or one.lacks_certificate]
        real = real or [verdict for verdict in verdicts if not verdict.error] or verdicts
        text = "; ".join(dict.fromkeys(verdict.message for verdict in real))
        verdict = msgspec.structs.replace(real[0], message=text)
        return self._outcome(verdict, failed[verdicts.index(real[0])].address)

    def _outcome(self, verdict: ExchangeResult, address: str | None) -> ProbeOutcome:
        duration = self._prober.loop.time() - self._started
        return ProbeOutcome(
            verdict.result,
            verdict.message,
            verdict.error,
            duration,
            address,
            is_redirected=verdict.is_redirected,
            lacks_certificate=verdict.lacks_certificate,
        )

    def _finish(self, outcome: ProbeOutcome) -> None:
        self._stop()
        self._done(outcome)

    def _stop(self) -> None:
        self.over = True
        self._prober.alarms.remove(self)
        for attempt in self._active:
            attempt.cancel()
        self._active.clear()
        self._candidates = ()


async def probe(probe: Probe, *, netns: Netns, addresses: Sequence[str]) -> ProbeOutcome:
    """Probe once and wait for the outcome; it takes the timeout at most, and never raises for what
    the pod does. Raises ValueError as `plan` does.
    """
    prepared = plan(probe, addresses)
    return await run_once(Prober(asyncio.get_running_loop()), prepared, netns)


async def run_once(prober: Prober, plan: ProbePlan, netns: Netns) -> ProbeOutcome:
    """Run a plan with a prober of its own, which is closed at the end."""
    outcome: asyncio.Future[ProbeOutcome] = prober.loop.create_future()
    run = prober.start(plan, netns, outcome.set_result)
    try:
        return await outcome
    finally:
        run.cancel()
        prober.close()

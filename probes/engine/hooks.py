"""Lifecycle hooks: postStart and preStop by httpGet, from inside the pod (KEP-2771).

The rules are those of pkg/kubelet/lifecycle/handlers.go: the pod is notified, and any response is a
success. The kubelet runs the hooks of a pod's spec; this module serves `podgate probe --hook`, and
pods that the kubelet cannot reach.
"""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from probes.engine import families, prober
from probes.netns import Netns
from probes.protocols import http_get
from probes.protocols.exchanges import ConnectionFailure, DialHop, Phase
from probes.protocols.user_agents import HOOK_USER_AGENT
from probes.results import ExchangeResult, ProbeOutcome, ProbeResult
from probes.spec.definitions import HttpGet, Probe

FALLBACK_REASON = "LifecycleHTTPFallback"
"""The Event's reason when a hook meant for https was answered by plain http."""


_NOT_HTTPS = "http: server gave HTTP response to HTTPS client"


def _evaluate(reader: "http_get.Reader") -> ExchangeResult:
    """Any status is a success, 5xx and unfollowed redirects too: the pod has received the hook."""
    return ExchangeResult(
        ProbeResult.SUCCESS, f"HTTP hook answered with statuscode: {reader.status}"
    )


# pkg/kubelet/kubelet.go makes this client with a TLS configuration of its own, which in Go
# turns HTTP/2 off, so it offers no protocol by ALPN.
CLIENT = http_get.HttpClientProfile(
    user_agent=HOOK_USER_AGENT, alpn=(), keep_alive=True, accept_gzip=True, evaluate=_evaluate
)


class HookTarget:
    """An httpGet hook and an address."""

    __slots__ = ("fallback", "first")

    def __init__(self, handler: HttpGet, address: str) -> None:
        self.first = http_get.HttpTarget(handler, address, CLIENT)
        self.fallback: http_get.HttpTarget | None = None
        if handler.scheme == "HTTPS":
            # Credentials meant for TLS are never sent in clear, those of the path neither.
            headers = tuple(
                (name, value) for name, value in handler.headers if name.lower() != "authorization"
            )
            plain = msgspec.structs.replace(handler, scheme="HTTP", headers=headers)
            self.fallback = http_get.HttpTarget(plain, address, CLIENT, with_user=False)

    def exchange(self) -> "HookExchange":
        return HookExchange(self)


class HookExchange:
    """One hook: over https if specified, then over http if the server speaks http only."""

    __slots__ = ("_exchange", "_fallback", "_rejected")

    def __init__(self, target: HookTarget) -> None:
        self._exchange = target.first.exchange()
        self._fallback = target.fallback
        self._rejected: ExchangeResult | None = None
        """How https failed, once plain http is tried instead."""

    @property
    def hop(self) -> DialHop:
        return self._exchange.hop

    @property
    def verdict(self) -> ExchangeResult | None:
        verdict = self._exchange.verdict
        if verdict is None or self._rejected is None:
            return verdict
        if verdict.result.passed:
            return ExchangeResult(ProbeResult.WARNING, f"{FALLBACK_REASON}: {verdict.message}")
        # The kubelet reports the first failure, not the second attempt's.
        return self._rejected

    def start(self) -> bytes:
        return self._exchange.start()

    def receive(self, data: bytes) -> bytes:
        return self._exchange.receive(data)

    def fail(self, broken: ConnectionFailure) -> None:
        self._exchange.fail(broken)
        if self._fallback is not None and broken.phase is Phase.TLS and broken.text == _NOT_HTTPS:
            self._rejected = self._exchange.verdict
            self._exchange, self._fallback = self._fallback.exchange(), None


def plan(
    handler: HttpGet, addresses: Sequence[str], limit_seconds: float | None = None
) -> prober.ProbePlan:
    """Prepare a hook for the first of the pod's addresses, as the kubelet does.

    A hook has side effects, so it is never sent to a second family. None for `limit_seconds` means
    no limit, as the kubelet sets none for postStart; preStop gets the rest of the grace period.
    Raises ValueError for an invalid address and for a limit that is not positive.
    """
    limit = math.inf if limit_seconds is None else limit_seconds
    if not limit > 0:
        raise ValueError(f"a hook's time limit must be positive, not {limit}")
    single = Probe(handler, timeout_seconds=limit, ip_family_policy="SingleStack")
    try:
        ((address,),) = families.groups(single, addresses)
    except families.NoAddressError as error:
        return prober.ProbePlan((), limit, limit, str(error))
    candidate = prober.candidate_for(address, HookTarget(handler, address))
    return prober.ProbePlan(((candidate,),), limit, limit)


async def run(
    handler: HttpGet,
    *,
    netns: Netns,
    addresses: Sequence[str],
    limit_seconds: float | None = None,
) -> ProbeOutcome:
    """Run one hook and wait for its end; Failure only without a response.

    Warning, with FALLBACK_REASON in front of the message, if an https hook was answered over plain
    http. Raises ValueError as `plan` does; closes the connection when cancelled.
    """
    running = prober.Prober(asyncio.get_running_loop())
    return await prober.run_once(running, plan(handler, addresses, limit_seconds), netns)

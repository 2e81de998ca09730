"""The steps of one probe, for `podgate probe`.

Exchanges are wrapped, so that the scheduler's probes pay nothing for it, and the steps shown are
those of a real probe.
"""

from collections.abc import Callable

import msgspec

from probes.engine.prober import DialCandidate, ProbePlan
from probes.protocols.exchanges import (
    ConnectionFailure,
    DialHop,
    Exchange,
    ExchangeTarget,
    Phase,
    join_host_port,
)
from probes.results import ExchangeResult

SHOWN_MAX_CHARS = 120
"""Maximum of sent or received data shown: a status line or a few frames."""

StepCallback = Callable[[str, str], None]
"""Called with the address and one step's text, at the time of the step."""


def traced(plan: ProbePlan, on_step: StepCallback) -> ProbePlan:
    """The same plan, which reports its steps."""

    def wrapped(candidate: DialCandidate) -> DialCandidate:
        target = _TracedTarget(candidate.target, candidate.address, on_step)
        return msgspec.structs.replace(candidate, target=target)

    groups = tuple(tuple(wrapped(candidate) for candidate in group) for group in plan.groups)
    return msgspec.structs.replace(plan, groups=groups)


class _TracedTarget:
    def __init__(self, target: ExchangeTarget, address: str, on_step: StepCallback) -> None:
        self._target = target
        self._address = address
        self._on_step = on_step

    def exchange(self) -> Exchange:
        return _TracedExchange(self._target.exchange(), self._address, self._on_step)


class _TracedExchange:
    def __init__(self, exchange: Exchange, address: str, on_step: StepCallback) -> None:
        self._exchange = exchange
        self._address = address
        self._on_step = on_step
        self._dialled: DialHop | None = None

    @property
    def hop(self) -> DialHop:
        # The caller reads the hop when it is about to dial it.
        hop = self._exchange.hop
        if hop is not self._dialled:
            again = "" if self._dialled is None else "hangs up and "
            self._dialled = hop
            self._report(f"{again}dials tcp {join_host_port(self._address, hop.port)}")
        return hop

    @property
    def verdict(self) -> ExchangeResult | None:
        return self._exchange.verdict

    def start(self) -> bytes:
        if self._exchange.hop.tls:
            self._report(
                "connected, and through the TLS handshake; the certificate is not verified"
            )
        else:
            self._report("connected")
        return self._sent(self._exchange.start())

    def receive(self, data: bytes) -> bytes:
        self._report(f"receives {shown(data)}" if data else "receives the end of the stream")
        return self._sent(self._exchange.receive(data))

    def fail(self, broken: ConnectionFailure) -> None:
        doing = {
            Phase.DIAL: "connecting",
            Phase.TLS: "shaking hands over TLS",
            Phase.EXCHANGE: "waiting for the answer",
        }[broken.phase]
        what = "the time is over" if broken.timeout else printable(broken.text)
        self._report(f"stops {doing}: {what}")
        self._exchange.fail(broken)

    def _sent(self, data: bytes) -> bytes:
        if data:
            self._report(f"sends {shown(data)}")
        return data

    def _report(self, text: str) -> None:
        self._on_step(self._address, text)


def shown(data: bytes) -> str:
    """The number of bytes and the first of them, as text without control characters."""
    first = data[:SHOWN_MAX_CHARS].decode("latin-1")
    more = "..." if len(data) > SHOWN_MAX_CHARS else ""
    return f"{len(data)} bytes: {printable(first)}{more}"


def printable(text: str) -> str:
    """Text of a pod for a terminal: it cannot move the cursor or change the title."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )

"""What happens in one probe, step by step, for `podgate probe`.

Exchanges are wrapped, so that the probes of the scheduler pay nothing for it
and what is shown is what they would do.
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
"""Of what was sent or received: a status line or a few frames."""

StepCallback = Callable[[str, str], None]
"""Called with the address and one step's text, at the time of the step."""


def traced(plan: ProbePlan, tell: StepCallback) -> ProbePlan:
    """The same plan, telling its steps."""

    def wrapped(candidate: DialCandidate) -> DialCandidate:
        target = _TracedTarget(candidate.target, candidate.address, tell)
        return msgspec.structs.replace(candidate, target=target)

    groups = tuple(tuple(wrapped(candidate) for candidate in group) for group in plan.groups)
    return msgspec.structs.replace(plan, groups=groups)


class _TracedTarget:
    def __init__(self, target: ExchangeTarget, address: str, tell: StepCallback) -> None:
        self._target = target
        self._address = address
        self._tell = tell

    def exchange(self) -> Exchange:
        return _TracedExchange(self._target.exchange(), self._address, self._tell)


class _TracedExchange:
    def __init__(self, exchange: Exchange, address: str, tell: StepCallback) -> None:
        self._exchange = exchange
        self._address = address
        self._tell = tell
        self._dialled: DialHop | None = None

    @property
    def hop(self) -> DialHop:
        # Whoever runs an exchange asks for the hop when it is about to dial it.
        hop = self._exchange.hop
        if hop is not self._dialled:
            again = "" if self._dialled is None else "hangs up and "
            self._dialled = hop
            self._say(f"{again}dials tcp {join_host_port(self._address, hop.port)}")
        return hop

    @property
    def verdict(self) -> ExchangeResult | None:
        return self._exchange.verdict

    def start(self) -> bytes:
        if self._exchange.hop.tls:
            self._say("connected, and through the TLS handshake; the certificate is not verified")
        else:
            self._say("connected")
        return self._sent(self._exchange.start())

    def receive(self, data: bytes) -> bytes:
        self._say(f"receives {shown(data)}" if data else "receives the end of the stream")
        return self._sent(self._exchange.receive(data))

    def fail(self, broken: ConnectionFailure) -> None:
        doing = {
            Phase.DIAL: "connecting",
            Phase.TLS: "shaking hands over TLS",
            Phase.EXCHANGE: "waiting for the answer",
        }[broken.phase]
        what = "the time is over" if broken.timeout else printable(broken.text)
        self._say(f"stops {doing}: {what}")
        self._exchange.fail(broken)

    def _sent(self, data: bytes) -> bytes:
        if data:
            self._say(f"sends {shown(data)}")
        return data

    def _say(self, text: str) -> None:
        self._tell(self._address, text)


def shown(data: bytes) -> str:
    """A number of bytes and the first of them, as text without control characters."""
    first = data[:SHOWN_MAX_CHARS].decode("latin-1")
    more = "..." if len(data) > SHOWN_MAX_CHARS else ""
    return f"{len(data)} bytes: {printable(first)}{more}"


def printable(text: str) -> str:
    """Text of a pod for a terminal: nothing in it can move a cursor or change a title."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )

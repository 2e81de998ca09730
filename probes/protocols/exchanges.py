"""One probe's conversation with one address, apart from all sockets.

An exchange is fed bytes and says what to send, until it has a verdict: so
every protocol is tested with bytes alone, and the I/O knows no protocol.
"""

from enum import Enum, auto
from typing import Protocol

import msgspec

from probes.results import ExchangeResult


class Phase(Enum):
    """How far a connection had come when it broke."""

    DIAL = auto()
    TLS = auto()
    EXCHANGE = auto()


class ConnectionFailure(msgspec.Struct, frozen=True):
    """Why the conversation cannot go on."""

    phase: Phase
    text: str
    """In Go's words: `dial tcp 10.0.0.1:80: connect: connection refused`."""
    timeout: bool = False
    """The probe's time is over; `text` then only describes what was being done."""


class DialHop(msgspec.Struct, frozen=True):
    """Where to connect: the address is always the pod's, so only the rest is said."""

    port: int
    tls: bool = False
    alpn: tuple[str, ...] = ()


class Exchange(Protocol):
    """The sans-I/O side of a handler.

    After `start` and each `receive`, the caller looks at `verdict` (over: hang
    up) and at `hop` (another object than the one dialled: hang up, dial that,
    `start` again), then sends what was returned.
    """

    @property
    def hop(self) -> DialHop: ...

    @property
    def verdict(self) -> ExchangeResult | None: ...

    def start(self) -> bytes:
        """Connected, through TLS where the hop asks for it: what to send first."""
        ...

    def receive(self, data: bytes) -> bytes:
        """Take what the pod sent, b"" for its end of stream; returns what to send."""
        ...

    def fail(self, broken: ConnectionFailure) -> None:
        """The connection was not made, broke, or ran out of time.

        Sets `verdict`; or, when TLS failed, maybe another `hop` to try instead.
        """
        ...


class ExchangeTarget(Protocol):
    """A handler made ready for one address: what does not change between probes is done once."""

    def exchange(self) -> Exchange: ...


def join_host_port(host: str, port: int) -> str:
    """`1.2.3.4:80` or `[fd00::1]:80` (Go's net.JoinHostPort)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def go_duration(seconds: float) -> str:
    """`seconds` as Go's time.Duration prints them: 1s, 1.5s, 500ms, 1m0s."""
    microseconds = round(seconds * 1e6)
    if microseconds < 1000:
        return f"{microseconds}µs" if microseconds else "0s"
    if microseconds < 1_000_000:
        return f"{_decimal(microseconds, 1000)}ms"
    minutes, rest = divmod(microseconds, 60_000_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, 1_000_000)}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _decimal(value: int, unit: int) -> str:
    whole, part = divmod(value, unit)
    if not part:
        return str(whole)
    digits = len(str(unit)) - 1
    return f"{whole}.{part:0{digits}d}".rstrip("0")

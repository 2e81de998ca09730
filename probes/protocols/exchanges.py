"""Exchanges: the sans-I/O side of a probe with one address.

An exchange gets bytes and returns what to send, until it has a verdict. So every protocol is tested
with bytes alone, and the I/O is independent of protocols.
"""

from enum import Enum, auto
from typing import Protocol

import msgspec

from probes.results import ExchangeResult
from probes.spec.definitions import TlsPolicy


class Phase(Enum):
    """The phase in which a connection failed."""

    DIAL = auto()
    TLS = auto()
    EXCHANGE = auto()


class ConnectionFailure(msgspec.Struct, frozen=True):
    """Why the exchange cannot continue."""

    phase: Phase
    text: str
    """In Go's words: `dial tcp 10.0.0.1:80: connect: connection refused`."""
    timeout: bool = False
    """The probe timed out; `text` then only describes the current operation."""


class DialHop(msgspec.Struct, frozen=True):
    """Where to connect. The address is always the pod's, so it is left out."""

    port: int
    tls: bool = False
    alpn: tuple[str, ...] = ()
    policy: TlsPolicy | None = None


class Exchange(Protocol):
    """The sans-I/O side of a handler.

    After `start` and each `receive`, the caller reads `verdict` (set: close the connection) and
    `hop` (another object than the one dialled: close, dial that, `start` again), then sends the
    returned bytes.
    """

    @property
    def hop(self) -> DialHop: ...

    @property
    def verdict(self) -> ExchangeResult | None: ...

    def start(self) -> bytes:
        """The bytes to send first, once connected, and through TLS if the hop has it."""
        ...

    def receive(self, data: bytes) -> bytes:
        """Handle bytes from the pod, b"" for the end of its stream; returns what to send."""
        ...

    def fail(self, broken: ConnectionFailure) -> None:
        """The connection failed to open, broke, or ran out of time.

        Sets `verdict`, or another `hop` to connect to next.
        """
        ...


class ExchangeTarget(Protocol):
    """A handler prepared for one address: everything that is equal in all probes is done once."""

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

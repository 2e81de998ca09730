"""The tcpSocket probe: an open port is healthy (pkg/probe/tcp/tcp.go)."""

from __future__ import annotations

from probes.protocols.exchanges import Broken, Hop
from probes.results import Result, Verdict

_OPEN = Verdict(Result.SUCCESS)


class TcpTarget:
    """A tcpSocket handler; nothing depends on the address."""

    def __init__(self, port: int) -> None:
        self.hop = Hop(port)

    def exchange(self) -> TcpExchange:
        return TcpExchange(self.hop)


class TcpExchange:
    """Over as soon as it starts; nothing is ever sent."""

    __slots__ = ("hop", "verdict")

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self.verdict: Verdict | None = None

    def start(self) -> bytes:
        self.verdict = _OPEN
        return b""

    def receive(self, data: bytes) -> bytes:
        return b""

    def fail(self, broken: Broken) -> None:
        # Go's dialer puts its own words in place of the deadline's.
        text = f"{broken.text}: i/o timeout" if broken.timeout else broken.text
        self.verdict = Verdict(Result.FAILURE, text)

"""The tcpSocket probe: an open port is healthy (pkg/probe/tcp/tcp.go)."""

from probes.protocols.exchanges import ConnectionFailure, DialHop
from probes.results import ExchangeResult, ProbeResult

_OPEN = ExchangeResult(ProbeResult.SUCCESS)


class TcpTarget:
    """A tcpSocket handler; nothing depends on the address."""

    def __init__(self, port: int) -> None:
        self.hop = DialHop(port)

    def exchange(self) -> "TcpExchange":
        return TcpExchange(self.hop)


class TcpExchange:
    """Over as soon as it starts; nothing is ever sent."""

    __slots__ = ("hop", "verdict")

    def __init__(self, hop: DialHop) -> None:
        self.hop = hop
        self.verdict: ExchangeResult | None = None

    def start(self) -> bytes:
        self.verdict = _OPEN
        return b""

    def receive(self, data: bytes) -> bytes:
        return b""

    def fail(self, broken: ConnectionFailure) -> None:
        # Go's dialer puts its own words in place of the deadline's.
        text = f"{broken.text}: i/o timeout" if broken.timeout else broken.text
        self.verdict = ExchangeResult(ProbeResult.FAILURE, text)

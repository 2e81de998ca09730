"""The protocol between agent and relay: JSON messages in frames, over a socket pair.

A frame is its length in four bytes, most significant first, and one message.
"""

import struct
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from agent.errors import PodgateError

T = TypeVar("T")

_LENGTH = struct.Struct("!I")
# The targets of 500 pods are 200 KB.
_MAX_BYTES = 16 << 20

Outcome = Literal[
    "proxied",  # the pod accepted; closed by either end
    "reset",  # the pod accepted, and later sent a RST
    "refused",  # the pod refused the connection
    "timeout",  # the pod did not respond until the kubelet's timeout
    "undeclared",  # rejected: the pod declares no probe or hook for this port
    "unknown_address",  # rejected: no pod belongs to this relay address
    "sandbox_gone",  # rejected or reset, because the sandbox is gone
    "ambiguous",  # reset: the request does not show to which of several pods it belongs
    "failed",  # the relay itself failed: out of descriptors, namespace not accessible
]
"""The outcome of one connection of the kubelet."""

OPEN_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0)
"""Upper bounds, in seconds, of connect durations; longer ones are in no bucket."""


AnswerOutcome = Literal[
    "healthy",  # answered: 200, SERVING or accept
    "unhealthy",  # answered: 503, NOT_SERVING or RST
    "no_verdict",  # proxied: no verdict yet, or it was withdrawn
    "stale",  # proxied: the verdict has ended
    "not_probe",  # proxied: not the probe, or it did not arrive in time
]
"""The result of a connection to a port with answers."""


class HttpRequest(msgspec.Struct, frozen=True, tag=True):
    """The kubelet's http probe, byte for byte. A request with any other byte is proxied."""

    sent: bytes
    """Request line, headers in the order of Go's client, and the empty line after them: from
    `probes.protocols.http1_requests.request_bytes`."""


class GrpcRequest(msgspec.Struct, frozen=True, tag=True):
    """The kubelet's gRPC probe: Check of grpc.health.v1.Health (pkg/probe/grpc/grpc.go)."""

    service: str


class TcpConnect(msgspec.Struct, frozen=True, tag=True):
    """The kubelet's tcp probe: a connection without data. Only for a port to which the kubelet
    connects for nothing else; it is the only answer of its port."""


class Answer(msgspec.Struct, frozen=True):
    """A probe of the kubelet that is answered with podgate's verdict instead of proxied."""

    id: int
    """The agent's number for it; verdicts contain it. Unique within its target."""
    port: int
    request: HttpRequest | GrpcRequest | TcpConnect
    needs_pod: bool = True
    """Whether the kubelet may connect to the port for something else: a proxied probe, a hook, a
    redirect. Then a SYN is held until the pod accepts, so that a closed port still rejects it.
    Otherwise the port need not be open. Ignored for `TcpConnect`."""


class SharedRequest(msgspec.Struct, frozen=True):
    """A plain http request by which the relay finds the pod of a connection to a shared port."""

    port: int
    sent: bytes
    """As in `HttpRequest`."""
    key: str
    """Of the target to which the kubelet sends it."""


class Sharing(msgspec.Struct, frozen=True):
    """Several pods have the address of a target, and it accepts connections for all of them."""

    ports: tuple[int, ...]
    """At these, claimed ports the first request decides which pod gets the connection; 0 as in
    claims."""
    requests: tuple[SharedRequest, ...]
    otherwise: str = ""
    """Key of the target that gets connections with other requests; "" to reset them."""


class RelayTargetSpec(msgspec.Struct, frozen=True):
    """One address of a pod's sandbox, and the ports that the kubelet may reach."""

    key: str
    """The agent's name for it; responses and reports contain it."""
    netns_path: str
    netns_device: int
    netns_inode: int
    address: str
    ports: tuple[tuple[int, int], ...]
    """First and last port of each admitted range."""
    claims: tuple[int, ...]
    """Ports at which connects to the address are redirected to the relay; 0 for all ports that no
    other target claims."""
    admits_translated: bool = False
    """Whether the pod's gate admits the kubelet beside the relay, if it connects to an address that
    is translated to the pod's."""
    answers: tuple[Answer, ...] = ()
    """Probes to answer. An answer that differs from the previous one of its id has no verdict."""
    sharing: Sharing | None = None
    user: int = 0
    """Id of the user whose sockets connect to the pod: rules of a mesh may exempt the proxy's."""


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message. subnets: the relay's own share of the ranges, in CIDR notation."""

    bpffs: str
    programs: str
    """The hash of the sources of the agent's programs: a relay needs no hash function for it."""
    cgroup: str
    subnet4: str
    subnet6: str
    inside: str
    """Name of the pair's end in the relay's namespace."""
    orphan_seconds: float = 0.0
    """How long the relay continues without its agent; 0: it releases itself at once."""
    tries_way: bool = False
    """Whether the relay tries the way from the host to itself while it has no agent: its gate
    admits this process."""


class PairReady(msgspec.Struct, frozen=True, tag=True):
    """The veth pair is up at both ends. ifindex: of the host's end."""

    ifindex: int


class SetTargets(msgspec.Struct, frozen=True, tag=True):
    """All targets of the relay; replaces the previous ones."""

    revision: int
    targets: tuple[RelayTargetSpec, ...]


class ChangeTargets(msgspec.Struct, frozen=True, tag=True):
    """Targets that are new or another than in the message before, and keys of those that are gone;
    all others stay."""

    revision: int
    changed: tuple[RelayTargetSpec, ...]
    removed: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True):
    """The result of podgate's latest check of one probe, without any threshold: the kubelet applies
    its own to the answers."""

    target_key: str
    answer_id: int
    is_healthy: bool
    reason: str
    """One sentence; the body of the answer to an http probe."""
    ends_ns: int | None
    """When it becomes stale: end of the check, plus period and timeout; CLOCK_BOOTTIME, which
    counts the time in suspend and no steps of the wall clock. None withdraws the verdict."""


class SetVerdicts(msgspec.Struct, frozen=True, tag=True):
    """Changed verdicts; the others stay. Those of unknown targets or answers are ignored."""

    entries: tuple[Verdict, ...]


class Engage(msgspec.Struct, frozen=True, tag=True):
    """Redirect the kubelet's connects to this relay."""


DRAIN_SECONDS = 30.0
"""Probes end within seconds; a hook's connection may be idle, and its client opens another."""
OVERDUE_SECONDS = DRAIN_SECONDS + 10.0
"""A relay that still runs this long after its release hangs."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Stop redirecting; proxy open connections for at most this time, and exit.

    For a relay without its agent the signal SIGTERM is the same.
    """

    drain_seconds: float


class NetnsReady(msgspec.Struct, frozen=True, tag=True):
    """The relay is in a network namespace of its own, which has no interface yet."""


class RelayReady(msgspec.Struct, frozen=True, tag=True):
    """The relay can hold SYNs and proxy connections."""


class TargetsApplied(msgspec.Struct, frozen=True, tag=True):
    """The targets of this revision's message are active, except the rejected: one sentence by
    key."""

    revision: int
    rejected: dict[str, str] = {}


class Engaged(msgspec.Struct, frozen=True, tag=True):
    """The kubelet's connects are redirected."""


class RelayFailed(msgspec.Struct, frozen=True, tag=True):
    """The relay has failed and exits. message: one sentence."""

    message: str


class RelayWarning(msgspec.Struct, frozen=True, tag=True):
    """An operation failed, and the relay continues. message: one sentence for the agent's log."""

    message: str


class OutcomeSample(msgspec.Struct, frozen=True):
    """Connections to one port of one target with the same outcome, since the last report.

    key: "" for connections to addresses without a target.
    """

    key: str
    port: int
    outcome: Outcome
    count: int
    open_seconds: float
    """Sum of connect durations: from the kubelet's SYN to the pod's response or the timeout."""
    buckets: tuple[int, ...]
    """Number of durations in each bucket of OPEN_BUCKETS; not cumulative."""


class AnswerSample(msgspec.Struct, frozen=True):
    """Connections to one port with answers of one target, since the last report."""

    key: str
    port: int
    outcome: AnswerOutcome
    count: int


class RelayReport(msgspec.Struct, frozen=True, tag=True):
    """The relay's load, and the outcomes since the last report."""

    connections: int
    """Connections that are proxied now."""
    held_syns: int
    """SYNs that are held now."""
    is_full: bool
    """Whether connects bypass the relay because it has no capacity left."""
    samples: tuple[OutcomeSample, ...]
    """Connections that were answered are not among them."""
    answers: tuple[AnswerSample, ...] = ()


ToRelay = Configure | PairReady | SetTargets | ChangeTargets | SetVerdicts | Engage | Release
FromRelay = (
    NetnsReady | RelayReady | TargetsApplied | Engaged | RelayFailed | RelayWarning | RelayReport
)


class FrameError(PodgateError):
    """The other side sent something that is not a message of this protocol."""


def pack(message: ToRelay | FromRelay) -> bytes:
    """One frame."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream into frames: bytes in, bodies of complete frames out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Bodies that are now complete. Raises `FrameError`."""
        self._rest += received
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > _MAX_BYTES:
                raise FrameError(f"frame of {length} bytes exceeds {_MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._rest) < end:
                return
            body, self._rest = self._rest[_LENGTH.size : end], self._rest[end:]
            yield body


def decode_for_relay(body: bytes) -> ToRelay:
    """Raises `FrameError`."""
    return _decode(body, _FOR_RELAY)


def decode_for_agent(body: bytes) -> FromRelay:
    """Raises `FrameError`."""
    return _decode(body, _FOR_AGENT)


_FOR_RELAY: msgspec.json.Decoder[ToRelay] = msgspec.json.Decoder(ToRelay)
_FOR_AGENT: msgspec.json.Decoder[FromRelay] = msgspec.json.Decoder(FromRelay)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"message cannot be decoded: {error}") from error

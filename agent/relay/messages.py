"""What the agent and the relay tell each other, over a socket pair: frames of JSON.

A frame is its length in four bytes, most significant first, and one message.
"""

import struct
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("!I")
# The targets of 500 pods are 200 KB.
_MOST_BYTES = 16 << 20

Outcome = Literal[
    "carried",  # opened at the pod, and ended as the two wished
    "reset",  # opened at the pod, which ended it with a RST
    "refused",  # the pod refused
    "unanswered",  # the pod did not answer for as long as the kubelet asked
    "undeclared",  # refused: the pod declares no probe or hook for this port
    "unknown",  # refused: no pod stands behind this address of the relay
    "gone",  # refused or ended, because the sandbox is gone
    "failed",  # the relay could not: out of descriptors, no way into the namespace
]
"""How one connection of the kubelet's ended."""

OPEN_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0)
"""Upper bounds, in seconds, of how long opening took; what is longer counts in no bucket."""


class WantedTarget(msgspec.Struct, frozen=True):
    """One address of one pod's sandbox, and what of it the kubelet may reach."""

    key: str
    """The agent's name for it; in answers and reports it comes back."""
    netns_path: str
    netns_device: int
    netns_inode: int
    address: str
    ports: tuple[tuple[int, int], ...]
    """First and last of each range that is admitted."""
    claims: tuple[int, ...]
    """Ports at which connects to the address are redirected here; 0 is all that nobody claims."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First of all. subnets: this relay's own share of the ranges, in CIDR notation."""

    bpffs: str
    cgroup: str
    subnet4: str
    subnet6: str
    inside: str
    """Name of the pair's end in the relay's namespace."""


class Paired(msgspec.Struct, frozen=True, tag=True):
    """The pair is up at both ends. ifindex: of the node's side."""

    ifindex: int


class Want(msgspec.Struct, frozen=True, tag=True):
    """All that is to be carried; replaces what was wanted before."""

    revision: int
    targets: tuple[WantedTarget, ...]


class Engage(msgspec.Struct, frozen=True, tag=True):
    """Redirect the kubelet's connects from now on."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Redirect no more; carry what is open, for at most so long, and end."""

    drain_seconds: float


class Unshared(msgspec.Struct, frozen=True, tag=True):
    """The relay is in a network namespace of its own, which has no interface yet."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """What is held and carried can come."""


class Have(msgspec.Struct, frozen=True, tag=True):
    """All targets of this revision stand, but for the refused: one sentence for each key."""

    revision: int
    refused: dict[str, str] = {}


class Engaged(msgspec.Struct, frozen=True, tag=True):
    """The kubelet's connects are redirected."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The relay cannot go on, and ends. message: one sentence."""

    message: str


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Something did not work, and the relay goes on. message: one sentence for the agent's log."""

    message: str


class Sample(msgspec.Struct, frozen=True):
    """Connections to one port of one target that ended alike, since the last report.

    key: "" for those to addresses without a target.
    """

    key: str
    port: int
    outcome: Outcome
    count: int
    open_seconds: float
    """Sum of how long opening took: from the kubelet's SYN to the answer, or to giving up."""
    buckets: tuple[int, ...]
    """For each bound of OPEN_BUCKETS how many took at most so long; not cumulative."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What happened since the last report, and what is so now."""

    open: int
    """Connections that are carried now."""
    held: int
    """Openings that wait for the pod's answer now."""
    is_full: bool
    """Whether connects go direct because there is no room for more."""
    samples: tuple[Sample, ...]


ToRelay = Start | Paired | Want | Engage | Release
FromRelay = Unshared | Ready | Have | Engaged | Failed | Trouble | Report


class FrameError(Exception):
    """The other side does not speak this protocol."""


def pack(message: ToRelay | FromRelay) -> bytes:
    """One frame."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes a stream apart: bytes in, bodies of whole frames out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Bodies that are complete now. Raises `FrameError`."""
        self._rest += received
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > _MOST_BYTES:
                raise FrameError(f"a frame of {length} bytes was announced")
            end = _LENGTH.size + length
            if len(self._rest) < end:
                return
            body, self._rest = self._rest[_LENGTH.size : end], self._rest[end:]
            yield body


def read_for_relay(body: bytes) -> ToRelay:
    """Raises `FrameError`."""
    return _decode(body, _FOR_RELAY)


def read_for_agent(body: bytes) -> FromRelay:
    """Raises `FrameError`."""
    return _decode(body, _FOR_AGENT)


_FOR_RELAY: msgspec.json.Decoder[ToRelay] = msgspec.json.Decoder(ToRelay)
_FOR_AGENT: msgspec.json.Decoder[FromRelay] = msgspec.json.Decoder(FromRelay)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(f"a message could not be read: {error}") from error

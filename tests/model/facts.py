"""What the gate knows of a packet and of the node: the input of its specification (gate.py).

Addresses are 16 bytes, IPv4 ones mapped (RFC 4291, 2.5.5.2). A network is its first bytes.
"""

import dataclasses
import enum
from collections.abc import Mapping

from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

SECOND = 1_000_000_000

# -------------------------------------------------------------------------------------- of a packet


class Stamp(enum.Enum):
    """What programs have written on a packet that the host made, before it lost its socket."""

    NONE = enum.auto()
    PLAIN = enum.auto()
    """A program saw its socket, by which no process writes headers."""
    UNPROVEN = enum.auto()
    """Its socket was lost before a program saw it."""
    HAND_MADE = enum.auto()
    """A process wrote it header by header."""
    RULE = enum.auto()
    PROBE = enum.auto()
    UNIDENTIFIED = enum.auto()
    """As PLAIN; and a program on a device of the host admitted it, with this reason."""


PLAIN_STAMPS = {Stamp.PLAIN, Stamp.RULE, Stamp.PROBE, Stamp.UNIDENTIFIED}


class Kind(enum.Enum):
    """The kind of the socket that sent a packet."""

    PACKET = enum.auto()
    """A packet socket, or the descriptor of a macvtap."""
    RAW = enum.auto()
    """A raw socket of a process."""
    KERNEL = enum.auto()
    """A raw socket of the kernel's own, by which it answers."""
    TCP = enum.auto()
    REQUEST = enum.auto()
    """TCP as well: a connection that is not open yet, or in TIME-WAIT."""
    UDP = enum.auto()
    UDPLITE = enum.auto()
    OTHER = enum.auto()


BY_HAND = {Kind.PACKET, Kind.RAW}
DATAGRAMS = {Kind.UDP: 17, Kind.UDPLITE: 136}


@dataclasses.dataclass(frozen=True, slots=True)
class Socket:
    """bound: the address that it is bound to or connected from; foreign_sources: how many sources
    that were not the node's it has sent with, counted to 2; foreign_source: the first of these.
    connected: where it connected to past a serving relay; NOWHERE if it is bound to an interface.
    """

    kind: Kind
    cgroup: Cgroup
    number: int = 0
    bound: bytes | None = None
    foreign_source: bytes | None = None
    foreign_sources: int = 0
    connected: bytes | None = None


NOWHERE = bytes(16)


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A frame that leaves by a pod's interface.

    ingress: number of the interface by which it came in, 0 for none; switch_stamp: the one in its
    priority, by which it is known behind a switch; pending_end: where a checksum ends that is still
    to be written, in bytes of the frame, None if it is complete; has_segments: whether a device
    splits it into several; is_tagged: with the tag of a VLAN interface, which is not in the frame;
    is_looped: a group's datagram that the kernel has looped back to the
    interface by which the host sends it.
    """

    frame: bytes
    ingress: int = 0
    stamp: Stamp = Stamp.NONE
    switch_stamp: Stamp = Stamp.NONE
    socket: Socket | None = None
    is_tagged: bool = False
    pending_end: int | None = None
    has_segments: bool = False
    is_looped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
    """By which a process of the host opens a TCP connection, that is not answered yet. cgroup: None
    if it is unknown: no rule admits such a one."""

    cgroup: Cgroup | None
    sent_ns: int


LOOPBACK = 1
INTERFACES = 8 * 1024 * 1024
"""From this number on an interface may be one by which the host makes its packets come in again."""

# -------------------------------------------------------------------------------------- of the node


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    mode: Mode
    addresses: frozenset[bytes] = frozenset()
    rules: tuple[Rule, ...] = ()
    has_any_address: bool = False
    has_fallback: bool = True
    grace_until_ns: int = 0


FALLBACK = Gate(Mode.ENFORCE, rules=(Rule(SourceKind.KUBELET, protocol=6),), has_any_address=True)
"""Of an interface whose gate has no place in the maps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """As the pod sees it. peer: None for a group; ports of an ICMP echo: its identifier."""

    protocol: int
    pod: bytes
    pod_port: int
    peer: bytes | None
    peer_port: int


@dataclasses.dataclass(slots=True)
class Seen:
    """A flow's last packet that counts, and whether it has had a reply."""

    at_ns: int
    has_reply: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Fragmented:
    """A datagram in fragments, and how it comes."""

    source: bytes
    destination: bytes
    protocol: int
    identification: int
    ingress: int
    socket: int


@dataclasses.dataclass(slots=True)
class State:
    """What the gate knows. owners: the gate of each address of a pod, None if several have it;
    own: the node's addresses and ranges; is_own_listed: whether an agent lists them; routed: the
    networks that the node routes elsewhere, by family; proxied: ports of pods that a relay proxies,
    0 for all others of that pod, and whether it leaves translated connections to the gate;
    connects: by the sequence number of the SYN;
    denies_raw_sockets: to pods without a policy; raw_socket_creators: the policies' cgroups, by id,
    and whether with all below; is_netns_known: to hooks, which ignore other namespaces' sockets.
    """

    gate: Gate | None
    node: NodeFacts = dataclasses.field(default_factory=NodeFacts)
    owners: Mapping[bytes, Gate | None] = dataclasses.field(default_factory=dict)
    injectable: frozenset[int] = frozenset()
    own: tuple[bytes, ...] = ()
    is_own_listed: bool = True
    routed: Mapping[int, tuple[bytes, ...]] = dataclasses.field(default_factory=dict)
    is_relay_alive: bool = False
    proxied: Mapping[tuple[bytes, int], bool] = dataclasses.field(default_factory=dict)
    denied_host_probes: frozenset[tuple[bytes, int]] = frozenset()
    connects: Mapping[bytes, Connect] = dataclasses.field(default_factory=dict)
    denies_raw_sockets: bool = False
    raw_socket_creators: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    is_netns_known: bool = True
    flows: dict[Flow, Seen] = dataclasses.field(default_factory=dict)
    fragments: dict[Fragmented, int] = dataclasses.field(default_factory=dict)


LIFETIME_NS = 120 * SECOND
GROUP_LIFETIME_NS = 10 * SECOND
FRAGMENT_LIFETIME_NS = 60 * SECOND
HAIRPIN_LIFETIME_NS = 10 * SECOND
UNLISTED_AFTER_NS = 15 * SECOND

"""The specification of the gate's verdict on a packet to a pod, in words of the documentation.

`ORDER` is the table of all checks: the first one that knows a reason decides, and the reason shows
whether the packet passes. docs/security.md has the same table, which tests/model/page.py writes.
What rules admit is specified by bpf/rule_evaluation.py, which is used here.

This module is written for reading, from docs/security.md and docs/architecture.md. Nothing in it is
fast, and it calls nothing of the kernel. tests/kernel/test_gate_model.py runs the gate's own
program on the same frames, sockets and states, and compares each answer.

Addresses are 16 bytes, IPv4 ones mapped (RFC 4291, 2.5.5.2). A network is its first bytes.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping

from bpf.rule_evaluation import Cgroup, NewFlow, NodeFacts, find_rule
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict

SECOND = 1_000_000_000

# ---------------------------------------------------------------- what the kernel knows of a packet


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
    splits it into several; is_looped: a group's datagram that the kernel has looped back to the
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


LOOPBACK = 1
INTERFACES = 8 * 1024 * 1024
"""From this number on an interface may be one by which the host makes its packets come in again."""

# ------------------------------------------------------------------------------------------- states


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
    0 for all others of that pod, and whether it leaves translated connections to the gate.
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
    flows: dict[Flow, Seen] = dataclasses.field(default_factory=dict)
    fragments: dict[Fragmented, int] = dataclasses.field(default_factory=dict)


LIFETIME_NS = 120 * SECOND
GROUP_LIFETIME_NS = 10 * SECOND
FRAGMENT_LIFETIME_NS = 60 * SECOND
UNLISTED_AFTER_NS = 15 * SECOND

# ----------------------------------------------------------------------------------- what is parsed

ICMP, IGMP, TCP, UDP, DCCP, ICMPV6, SCTP, UDPLITE = 1, 2, 6, 17, 33, 58, 132, 136
WITH_PORTS = {TCP, UDP, DCCP, SCTP, UDPLITE}
HOP_OPTIONS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS = 0, 43, 44, 51, 60
EXTENSIONS = {HOP_OPTIONS, ROUTING, FRAGMENT, AUTHENTICATION, OPTIONS}
NO_TRANSPORT = EXTENSIONS | {59, 135, 139, 140, 253, 254, 255}
"""Nothing, headers for hosts that move or have several addresses, and experiments."""
MAX_EXTENSIONS = 8

ETHERNET, SHORTEST = 14, 34
DHCP_SERVER, DHCP_CLIENT = 67, 68
FIN, SYN, RST, ACK = 1, 2, 4, 16
ERRORS = {4: {3, 11, 12}, 6: {1, 2, 3, 4}}
REDIRECT = {4: 5, 6: 137}
LINK_CONTROL = {130, 131, 132, 133, 134, 135, 136, 143}
ECHO_REQUEST, ECHO_REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}
ANY_IPV4 = bytes(10) + b"\xff\xff" + bytes(4)


@dataclasses.dataclass(slots=True)
class Packet:
    """A frame that was read up to its transport header. family: 0 for ARP, which has nothing else;
    payload: from the transport header on; length: of it by the IP header, 0 if unknown;
    fragment: None, or its place in the datagram in bytes.
    """

    family: int = 0
    source: bytes = NOWHERE
    destination: bytes = NOWHERE
    protocol: int = 0
    payload: bytes = b""
    length: int = 0
    fragment: int | None = None
    identification: int = 0

    @property
    def is_later_fragment(self) -> bool:
        return bool(self.fragment)

    @property
    def is_icmp(self) -> bool:
        return self.protocol == {4: ICMP, 6: ICMPV6}.get(self.family)

    @property
    def icmp_type(self) -> int | None:
        """None for a fragment, too."""
        is_read = self.is_icmp and self.fragment is None and self.payload
        return self.payload[0] if is_read else None

    @property
    def ports(self) -> tuple[int, int]:
        """Source and destination; 0 where there are none, and for a later fragment."""
        if self.protocol not in WITH_PORTS or self.is_later_fragment or len(self.payload) < 4:
            return 0, 0
        return number(self.payload, 0), number(self.payload, 2)

    @property
    def is_dhcp_answer(self) -> bool:
        is_udp = self.family == 4 and self.protocol == UDP
        return is_udp and self.ports == (DHCP_SERVER, DHCP_CLIENT)

    def echo(self, wanted: Mapping[int, int]) -> int | None:
        """The identifier of an echo of the wanted type."""
        if len(self.payload) < 6 or self.payload[0] != wanted[self.family]:
            return None
        return number(self.payload, 4)


def number(data: bytes, at: int, size: int = 2) -> int:
    return int.from_bytes(data[at : at + size])


def parse(frame: bytes) -> Packet | None:
    """None: the frame does not show its transport header."""
    if len(frame) < SHORTEST:
        return None
    match number(frame, 12):
        case 0x0806:
            return Packet()
        case 0x0800:
            return parse_ipv4(frame[ETHERNET:])
        case 0x86DD:
            return parse_ipv6(frame[ETHERNET:])
    return None


def parse_ipv4(packet: bytes) -> Packet | None:
    version, words = divmod(packet[0], 16)
    header, total, place = words * 4, number(packet, 2), number(packet, 6) % 0x4000
    is_longer = total == 0  # than the field can express (BIG TCP)
    if version != 4 or header < 20 or (total < header and not is_longer):
        return None
    more, offset = divmod(place, 0x2000)
    return Packet(
        family=4,
        source=ANY_IPV4[:12] + packet[12:16],
        destination=ANY_IPV4[:12] + packet[16:20],
        protocol=packet[9],
        payload=packet[header:],
        length=0 if is_longer else total - header,
        fragment=offset * 8 if more or offset else None,
        identification=number(packet, 4),
    )


def parse_ipv6(packet: bytes) -> Packet | None:
    """Up to eight extension headers, and then a fragment header, behind which none may follow."""
    if len(packet) < 40 or packet[0] // 16 != 6:
        return None
    found = Packet(6, packet[8:24], packet[24:40])
    protocol, at, count = packet[6], 40, 0
    while protocol in EXTENSIONS and found.fragment is None:
        header = packet[at : at + 8]
        is_last = protocol == FRAGMENT
        if len(header) < 4 or (count == MAX_EXTENSIONS and not is_last):
            return None
        if protocol == ROUTING and header[3]:  # this is not the last destination
            return None
        if protocol == FRAGMENT:
            found.fragment, size = number(header, 2) // 8 * 8, 8
            found.identification = number(packet, at + 4, 4)
        elif protocol == AUTHENTICATION:
            size = (header[1] + 2) * 4
        else:
            size = (header[1] + 1) * 8
        protocol, at, count = header[0], at + size, count + 1
    length = number(packet, 4)
    is_longer = length == 0
    if protocol in NO_TRANSPORT or (length < at - 40 and not is_longer):
        return None
    found.protocol, found.payload = protocol, packet[at:]
    found.length = 0 if is_longer else length - (at - 40)
    return found


# ----------------------------------------------------------------------------------- one evaluation


class Case:
    """A frame, the state, and what checks have found so far."""

    def __init__(self, sent: Sent, state: State, now_ns: int) -> None:
        self.sent, self.state, self.now_ns = sent, state, now_ns
        self.socket, self.stamp = sent.socket, sent.stamp
        if not self.socket and not sent.ingress and state.node.has_ovs and self.is_unstamped:
            self.stamp = sent.switch_stamp
        self.gate = state.gate or FALLBACK
        self.packet = Packet()
        self.is_stray = False
        """Not to an address of this pod."""
        self.is_behind_pod = False
        """Nor to one of another pod: maybe to a client for which this one routes."""

    @property
    def is_unstamped(self) -> bool:
        return self.stamp is Stamp.NONE

    @property
    def has_no_origin(self) -> bool:
        return self.socket is None and self.sent.ingress == 0 and self.is_unstamped

    @property
    def is_hand_made(self) -> bool:
        if self.socket is None:
            return self.stamp is Stamp.HAND_MADE
        return self.socket.kind in BY_HAND

    @property
    def is_tcp(self) -> bool:
        return self.packet.protocol == TCP

    @property
    def is_link_control(self) -> bool:
        """Without which the pod has no network. IPv4's is ARP and IGMP."""
        packet = self.packet
        if packet.family == 6:
            return packet.icmp_type in LINK_CONTROL
        return packet.family == 0 or packet.protocol == IGMP

    @property
    def is_in_grace(self) -> bool:
        return not self.is_behind_pod and self.now_ns < self.gate.grace_until_ns

    @property
    def fragmented(self) -> Fragmented:
        packet, socket = self.packet, self.socket
        return Fragmented(
            *(packet.source, packet.destination, packet.protocol, packet.identification),
            *(self.sent.ingress, socket.number if socket else 0),
        )

    @property
    def dropped(self) -> Reason:
        if self.is_stray:
            return Reason.STRAY
        return Reason.KERNEL if self.has_no_origin else Reason.NODE


UNCOUNTED = "passes, and is not counted"
Found = Reason | str | None

# ---------------------------------------------------------------------------- origin, and the frame


def forwarded(case: Case) -> Found:
    sent, state = case.sent, case.state
    is_again = sent.ingress in state.injectable or sent.ingress >= INTERFACES
    is_seen = sent.stamp is not Stamp.NONE or sent.is_looped
    is_hosts = sent.ingress <= LOOPBACK or is_seen or is_again
    return None if is_hosts else UNCOUNTED


def off(case: Case) -> Found:
    return UNCOUNTED if case.gate.mode is Mode.OFF else None


def changed_later(case: Case) -> Found:
    if case.socket:
        is_from_packet_socket = case.socket.kind is Kind.PACKET
    else:
        is_from_packet_socket = case.sent.ingress == LOOPBACK
    is_pending = case.sent.pending_end is not None
    return Reason.UNPARSABLE if is_from_packet_socket and is_pending else None


def unreadable(case: Case) -> Found:
    packet = None if case.sent.is_tagged else parse(case.sent.frame)
    if packet is None:
        return Reason.UNPARSABLE
    case.packet = packet
    return None


def arp(case: Case) -> Found:
    if case.packet.family:
        return None
    is_read_by_pods = number(case.sent.frame, ETHERNET + 6) in (1, 2)
    return None if case.is_hand_made and is_read_by_pods else Reason.ARP


CHECKSUM_ENDS = {TCP: 18, UDP: 8, UDPLITE: 8, SCTP: 12}


def false_checksum(case: Case) -> Found:
    sent, packet = case.sent, case.packet
    if case.socket or sent.ingress <= LOOPBACK or case.stamp in PLAIN_STAMPS:
        return None
    if sent.pending_end is None:
        return None
    end = CHECKSUM_ENDS.get(packet.protocol) if not packet.is_later_fragment else None
    transport = len(sent.frame) - len(packet.payload)
    return Reason.UNPARSABLE if end is None or sent.pending_end < transport + end else None


def no_ports(case: Case) -> Found:
    packet = case.packet
    has_ports = packet.protocol in WITH_PORTS and not case.is_tcp and not packet.is_later_fragment
    return Reason.UNPARSABLE if has_ports and len(packet.payload) < 4 else None


def link_control(case: Case) -> Found:
    return Reason.CONTROL if case.is_link_control and not case.is_hand_made else None


# -------------------------------------------------------------------------------------- destination


def destination(case: Case) -> Found:
    """Whose gate decides. A pod in audit may forward to a pod in enforce, whose gate then does."""
    own, to, owners = case.gate, case.packet.destination, case.state.owners
    if case.is_link_control or to in own.addresses:
        return None
    owner = owners.get(to) if own.mode is Mode.AUDIT else None
    if owner and owner.mode in (Mode.ENFORCE, Mode.STRICT):
        case.gate, case.is_stray = owner, True
        return None
    if own.has_any_address:
        return None
    case.is_stray = True
    may_be_behind = (case.socket is not None or case.is_tcp) and to not in owners
    if may_be_behind or case.packet.is_dhcp_answer:
        case.is_behind_pod = True
        return None
    return Reason.STRAY


# ---------------------------------------------------------------------------------------------- TCP


def tcp_fragment(case: Case) -> Found:
    return Reason.FRAGMENT if case.is_tcp and case.packet.fragment is not None else None


def tcp_header(case: Case) -> Found:
    if not case.is_tcp:
        return None
    is_read = len(case.packet.payload) >= 14 and header_bytes(case) >= 20
    return None if is_read else Reason.UNPARSABLE


def header_bytes(case: Case) -> int:
    return case.packet.payload[12] // 16 * 4


def flags(case: Case) -> set[int]:
    return {flag for flag in (FIN, SYN, RST, ACK) if case.packet.payload[13] & flag}


def opens(case: Case) -> bool:
    return case.is_tcp and flags(case) & {SYN, ACK} == {SYN}


def path_test(case: Case) -> Found:
    is_to_port_0 = opens(case) and case.packet.ports[1] == 0
    return Reason.PATH_TEST if is_to_port_0 and not case.is_stray else None


def established(case: Case) -> Found:
    """A segment that opens nothing: of a TCP socket, of the kernel, or of a socket it has lost."""
    if not case.is_tcp or opens(case):
        return None
    if case.socket and case.socket.kind in (Kind.TCP, Kind.REQUEST):
        return Reason.ESTABLISHED
    if case.is_hand_made:
        return case.dropped
    is_lost = not case.socket and case.sent.ingress != LOOPBACK and not case.is_behind_pod
    return Reason.ESTABLISHED if is_lost or is_kernels_answer(case) else case.dropped


def is_kernels_answer(case: Case) -> bool:
    """For a closed port, or in TIME-WAIT: RST, or an acknowledgement that carries nothing."""
    if case.sent.has_segments:
        return False
    is_empty = case.packet.length == header_bytes(case)
    return RST in flags(case) or (is_empty and flags(case) == {ACK})


# ---------------------------------------------------------------------------------- other protocols


def forwarded_fragment(case: Case) -> Found:
    is_fragment = case.packet.family == 6 and case.packet.fragment is not None
    return Reason.FORWARDED if is_fragment and case.has_no_origin and not case.is_tcp else None


def icmp_error(case: Case) -> Found:
    is_error = case.packet.icmp_type in ERRORS.get(case.packet.family, ())
    return Reason.CONTROL if is_error and not case.is_hand_made else None


def redirect(case: Case) -> Found:
    type_ = case.packet.icmp_type
    return case.dropped if type_ is not None and type_ == REDIRECT[case.packet.family] else None


def later_fragment(case: Case) -> Found:
    if case.is_tcp or not case.packet.is_later_fragment:
        return None
    first_ns = case.state.fragments.get(case.fragmented)
    if first_ns is not None and case.now_ns - first_ns < FRAGMENT_LIFETIME_NS:
        return Reason.REPLY
    is_passed = case.is_in_grace and not case.is_hand_made
    return Reason.GRACE if is_passed else Reason.FRAGMENT


def reply(case: Case) -> Found:
    is_found = not case.is_tcp and not is_forged(case) and is_reply(case)
    return Reason.REPLY if is_found else None


def grace(case: Case) -> Found:
    is_passed = not case.is_tcp and not is_forged(case) and case.is_in_grace
    return Reason.GRACE if is_passed else None


def is_forged(case: Case) -> bool:
    """Whether this socket may not answer in this name. Answers of DHCP are written by hand, and so
    are those of protocols for which there are raw sockets only, in the node's own name."""
    packet, socket = case.packet, case.socket
    if packet.is_dhcp_answer:
        return False
    if case.is_hand_made:
        is_by_raw = socket is not None and socket.kind is Kind.RAW
        if not is_by_raw or packet.protocol in WITH_PORTS or packet.is_icmp:
            return True
    if socket is None or socket.kind is Kind.REQUEST:
        return False
    if packet.protocol in (UDP, UDPLITE) and DATAGRAMS.get(socket.kind) != packet.protocol:
        return True
    return not may_speak(case, socket)


def may_speak(case: Case, socket: Socket) -> bool:
    """In the node's own name; or in one that translation gave to an answer in the node's name."""
    if is_own(case, case.packet.source):
        return True
    chosen = [name for name in (socket.bound, socket.foreign_source) if name not in (None, NOWHERE)]
    if case.is_hand_made or not all(is_own(case, name) for name in chosen if name):
        return False
    return socket.foreign_sources < 2


def is_own(case: Case, address: bytes) -> bool:
    """While no agent lists the node's addresses: one that the node does not route elsewhere."""
    state = case.state
    if address == NOWHERE:
        return False
    if address.startswith(state.own):
        return True
    age_ns = state.node.heartbeat_age_ns(case.now_ns)
    if state.is_own_listed and (age_ns is None or age_ns < UNLISTED_AFTER_NS):
        return False
    return not address.startswith(state.routed.get(case.packet.family, ()))


def is_reply(case: Case) -> bool:
    """To a flow of the pod to this address, or to a group, whose members have any address."""
    packet, flows = case.packet, case.state.flows
    ports = packet.ports
    if packet.source == NOWHERE:  # no host's
        return False
    if packet.is_icmp:
        identifier = packet.echo(ECHO_REPLY)
        if identifier is None:
            return False
        ports = identifier, identifier
    is_written = packet.is_dhcp_answer and case.is_hand_made
    flow = Flow(packet.protocol, packet.destination, ports[1], packet.source, ports[0])
    lifetime_ns = GROUP_LIFETIME_NS if is_written else LIFETIME_NS
    seen = flows.get(flow)
    if seen and case.now_ns - seen.at_ns < lifetime_ns:
        if not is_written:
            renew(seen, case.now_ns)
        return True
    pod = ANY_IPV4 if case.is_stray else packet.destination
    seen = flows.get(dataclasses.replace(flow, pod=pod, peer=None))
    return seen is not None and case.now_ns - seen.at_ns < GROUP_LIFETIME_NS


def renew(seen: Seen, now_ns: int) -> None:
    """Most flows are one question and one answer, which is not to double their time."""
    if now_ns - seen.at_ns >= (1 if seen.has_reply else 30) * SECOND:
        seen.at_ns = now_ns
    seen.has_reply = True


# ---------------------------------------------------------------------------------------- new flows


def behind_pod(case: Case) -> Found:
    return case.dropped if case.is_behind_pod else None


def admitted_before(case: Case) -> Found:
    match case.stamp:
        case Stamp.RULE:
            return Reason.RULE
        case Stamp.PROBE:
            return Reason.PROBE
        case Stamp.UNIDENTIFIED:
            return maybe_kubelet(case)
    return None


def maybe_kubelet(case: Case) -> Reason:
    return Reason.STALE if case.state.node.kubelet_cgroups else Reason.UNIDENTIFIED


def rule(case: Case) -> Found:
    node, packet = case.state.node, case.packet
    cgroup = case.socket.cgroup if case.socket else None
    flow = NewFlow(
        packet.protocol,
        packet.ports[1],
        cgroup,
        is_kubelet=node.may_be_kubelet(cgroup, case.now_ns) and not is_past_relay(case),
        is_kernel=case.has_no_origin,
    )
    found = find_rule(case.gate.rules, flow)
    if found is None:
        return None
    if found.source is not SourceKind.KUBELET:
        return Reason.RULE
    return Reason.PROBE if node.is_kubelet_cgroup(cgroup) else maybe_kubelet(case)


def is_past_relay(case: Case) -> bool:
    """The identified kubelet, to a pod in strict, though a relay proxies this port."""
    gate, socket, state = case.gate, case.socket, case.state
    is_kubelet = socket is not None and state.node.is_kubelet_cgroup(socket.cgroup)
    if socket is None or not is_kubelet or gate.mode is not Mode.STRICT:
        return False
    if not gate.has_fallback:
        return True
    to, port = case.packet.destination, case.packet.ports[1]
    leaves_translated = state.proxied.get((to, port), state.proxied.get((to, 0)))
    if not case.is_tcp or not state.is_relay_alive or leaves_translated is None:
        return False
    if socket.kind is not Kind.TCP:
        return socket.kind is not Kind.REQUEST
    if socket.connected in (None, to):
        return False
    return not leaves_translated or socket.connected == NOWHERE


def dead_man(case: Case) -> Found:
    is_expired = case.state.node.is_dead_man_expired(case.now_ns)
    return Reason.DEAD_MAN if is_expired else None


def switch(case: Case) -> Found:
    may_be_anothers = case.has_no_origin and not case.is_stray
    return Reason.SWITCH if case.state.node.has_ovs and may_be_anothers else None


def past_relay(case: Case) -> Found:
    return Reason.STRICT if is_past_relay(case) else None


def rest(case: Case) -> Found:
    return case.dropped


# ---------------------------------------------------------------------------------------- the order

DROPS = (Reason.NODE, Reason.KERNEL, Reason.STRAY)
MAY_BE = (Reason.UNIDENTIFIED, Reason.STALE)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """what: the packets that it decides on; reasons: all that it gives."""

    decide: Callable[[Case], Found]
    what: str
    reasons: tuple[Reason, ...] = ()


ORDER = (
    Check(forwarded, "forwarded packets: they came in by an interface, without the host's stamp"),
    Check(off, "packets to a pod in `off`"),
    Check(
        changed_later,
        "frames of packet sockets whose bytes the kernel is to change (a pending checksum)",
        (Reason.UNPARSABLE,),
    ),
    Check(
        unreadable,
        "frames that do not show their transport header: VLAN tags, unknown EtherTypes, routing "
        "headers with segments left, more than eight extension headers",
        (Reason.UNPARSABLE,),
    ),
    Check(arp, "ARP, but requests and replies that a process wrote", (Reason.ARP,)),
    Check(
        false_checksum,
        "packets that came in again with a pending checksum in their headers",
        (Reason.UNPARSABLE,),
    ),
    Check(no_ports, "UDP, SCTP and the like without ports", (Reason.UNPARSABLE,)),
    Check(
        link_control,
        "neighbour discovery, MLD and IGMP, unless a process wrote them",
        (Reason.CONTROL,),
    ),
    Check(
        destination,
        "packets to no address of the pod, nor of a client for which it may route",
        (Reason.STRAY,),
    ),
    Check(tcp_fragment, "fragments of TCP", (Reason.FRAGMENT,)),
    Check(tcp_header, "TCP without a whole header", (Reason.UNPARSABLE,)),
    Check(path_test, "SYNs to port 0", (Reason.PATH_TEST,)),
    Check(
        established,
        "other TCP segments: of a TCP socket, of the kernel, or without a socket they pass",
        (Reason.ESTABLISHED, *DROPS),
    ),
    Check(
        forwarded_fragment,
        "IPv6 fragments without socket, interface and stamp",
        (Reason.FORWARDED,),
    ),
    Check(icmp_error, "ICMP errors, unless a process wrote them", (Reason.CONTROL,)),
    Check(redirect, "ICMP redirects", DROPS),
    Check(
        later_fragment,
        "later fragments: they pass if the first one passed, by the same way from the same socket",
        (Reason.REPLY, Reason.GRACE, Reason.FRAGMENT),
    ),
    Check(
        reply,
        "answers to the pod, from a socket that may speak in this name",
        (Reason.REPLY,),
    ),
    Check(grace, "what may be such an answer, during the grace period", (Reason.GRACE,)),
    Check(behind_pod, "new flows to clients for which the pod routes", DROPS),
    Check(
        admitted_before,
        "packets that a program on a device of the host admitted",
        (Reason.RULE, Reason.PROBE, *MAY_BE),
    ),
    Check(rule, "what a rule admits", (Reason.RULE, Reason.PROBE, *MAY_BE)),
    Check(dead_man, "everything, if no agent has run for too long", (Reason.DEAD_MAN,)),
    Check(switch, "packets without an origin, on a node with Open vSwitch", (Reason.SWITCH,)),
    Check(past_relay, "in `strict`, the kubelet past the relay", (Reason.STRICT,)),
    Check(rest, "everything else", DROPS),
)


UNRECORDED = (Reason.FORWARDED, Reason.CONTROL)
"""Later fragments of these pass as the first does, and others may not join them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """counted: None if the packet passes uncounted; stamp: with which it leaves, so that it is
    known where it comes back, for instance from a pod that forwards."""

    counted: tuple[Verdict, Reason] | None
    stamp: Stamp

    @property
    def is_dropped(self) -> bool:
        return self.counted is not None and self.counted[0] is Verdict.DROP


def evaluate(sent: Sent, state: State, now_ns: int) -> Answer:
    """Changes the state's flows and fragments as the packet does. now_ns: CLOCK_MONOTONIC."""
    case = Case(sent, state, now_ns)
    for check in ORDER:
        reason = check.decide(case)
        if isinstance(reason, Reason):
            break
        if reason == UNCOUNTED:
            is_hosts = check.decide is off
            return Answer(None, leaving_stamp(case) if is_hosts else Stamp.NONE)
    assert isinstance(reason, Reason)
    assert reason in check.reasons, (check, reason)
    verdict = Verdict.PASS
    if reason.is_drop:
        verdict = Verdict.WOULD_DROP if case.gate.mode is Mode.AUDIT else Verdict.DROP
    elif case.packet.fragment == 0 and reason not in UNRECORDED:
        state.fragments[case.fragmented] = now_ns
    return Answer((verdict, reason), leaving_stamp(case))


def leaving_stamp(case: Case) -> Stamp:
    if case.has_no_origin:
        return Stamp.NONE
    if case.is_hand_made:
        return Stamp.HAND_MADE
    is_proven = case.socket is not None or case.stamp in PLAIN_STAMPS
    return Stamp.PLAIN if is_proven else Stamp.UNPROVEN


def record(frame: bytes, state: State, now_ns: int, *, is_broadcast: bool = False) -> None:
    """A frame from the pod, whose answers are to pass. is_broadcast: to all of its network."""
    packet = parse(frame)
    if packet is None or packet.family == 0 or packet.is_later_fragment:
        return
    if packet.protocol == TCP or (packet.protocol in WITH_PORTS and len(packet.payload) < 4):
        return
    ports = packet.ports
    if packet.is_icmp:
        identifier = packet.echo(ECHO_REQUEST)
        if identifier is None:
            return
        ports = identifier, identifier
    to = packet.destination
    peer = None if is_broadcast or is_group(packet.family, to) else to
    state.flows[Flow(packet.protocol, packet.source, ports[0], peer, ports[1])] = Seen(now_ns)


def stamp_from_pod(stamp: Stamp) -> Stamp:
    """What is left of the stamp of a packet from the pod, which may forward it or have written the
    stamp itself: nothing that a pod gains by."""
    if stamp in (Stamp.NONE, Stamp.HAND_MADE):
        return stamp
    return Stamp.UNPROVEN


def is_group(family: int, address: bytes) -> bool:
    """Also `::`, to which only a process that writes its headers sends: any host may answer."""
    if family == 6:
        return address[0] == 0xFF or address == NOWHERE
    return address[12] // 16 == 14 or address[12:] == b"\xff\xff\xff\xff"

"""How a packet arrives at a gate: one evaluation, and its first checks (gate.py has their order).
Who has sent it, whether its frame can be read, and whose gate decides.
"""

from bpf.verdicts import Mode, Reason
from tests.model.facts import (
    BY_HAND,
    FALLBACK,
    HAIRPIN_LIFETIME_NS,
    INTERFACES,
    LOOPBACK,
    PLAIN_STAMPS,
    Connect,
    Fragmented,
    Kind,
    Sent,
    Stamp,
    State,
)
from tests.model.packet import (
    ETHERNET,
    IGMP,
    LINK_CONTROL,
    SCTP,
    TCP,
    UDP,
    UDPLITE,
    WITH_PORTS,
    Packet,
    number,
    parse,
    syn_sequence,
)

DROPS = (Reason.NODE, Reason.KERNEL, Reason.STRAY)
"""What has no other reason."""


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
        self.hairpin: Connect | None = None
        """Another machine sent it back: the connect of a process of the host."""

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
    def fragmented(self) -> Fragmented | None:
        """None: the frame does not show which datagram it belongs to."""
        packet, socket = self.packet, self.socket
        if packet.identification is None:
            return None
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
    if sent.ingress <= LOOPBACK or is_seen or is_again:
        return None
    sequence = syn_sequence(sent.frame)
    connect = state.connects.get(sequence) if sequence else None
    if connect is None or case.now_ns - connect.sent_ns > HAIRPIN_LIFETIME_NS:
        return UNCOUNTED
    case.hairpin, case.socket = connect, None
    return None


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
    packet = parse(case.sent.frame)
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

"""Whether a packet belongs to a flow that is open: TCP by its flags, others by what the pod has
sent. Part of the gate's specification (gate.py).
"""

import dataclasses

from bpf.verdicts import Reason
from tests.model.arrival import Case, Found
from tests.model.facts import (
    DATAGRAMS,
    FRAGMENT_LIFETIME_NS,
    GROUP_LIFETIME_NS,
    LIFETIME_NS,
    LOOPBACK,
    NOWHERE,
    SECOND,
    UNLISTED_AFTER_NS,
    Flow,
    Kind,
    Seen,
    Socket,
    State,
)
from tests.model.packet import (
    ACK,
    ANY_IPV4,
    ECHO_REPLY,
    ECHO_REQUEST,
    ERRORS,
    REDIRECT,
    RST,
    TCP,
    UDP,
    UDPLITE,
    WITH_PORTS,
    parse,
)

# ---------------------------------------------------------------------------------------------- TCP


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


def opens(case: Case) -> bool:
    return case.is_tcp and case.packet.is_syn


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
    return RST in case.packet.flags or (is_empty and case.packet.flags == {ACK})


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
    whole = case.fragmented
    first_ns = case.state.fragments.get(whole) if whole else None
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


# ------------------------------------------------------------------------------ what the pod sends


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


def is_group(family: int, address: bytes) -> bool:
    """Also `::`, to which only a process that writes its headers sends: any host may answer."""
    if family == 6:
        return address[0] == 0xFF or address == NOWHERE
    return address[12] // 16 == 14 or address[12:] == b"\xff\xff\xff\xff"

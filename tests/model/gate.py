"""The specification of the gate's verdict on a packet to a pod, in words of the documentation.

`ORDER` is the table of all checks: the first one that knows a reason decides, and the reason shows
whether the packet passes. docs/security.md has the same table, which tests/model/page.py writes.

| module | |
|---|---|
| facts.py | what is known of a packet, its socket and the node |
| packet.py | how a frame is read |
| arrival.py | who has sent it, and whose gate decides |
| flows.py | whether it belongs to a flow that is open |
| new_flows.py | who may open one |

These modules are written for reading, from docs/security.md and docs/architecture.md. Nothing in
them is fast, and they call nothing of the kernel. tests/kernel/test_gate_model.py runs the gate's
own program on the same frames, sockets and states, and compares each answer.
"""

import dataclasses
from collections.abc import Callable

from bpf.verdicts import Mode, Reason, Verdict
from tests.model import arrival, flows, new_flows
from tests.model.arrival import DROPS, UNCOUNTED, Case, Found
from tests.model.facts import PLAIN_STAMPS, Sent, Stamp, State
from tests.model.new_flows import MAY_BE


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """what: the packets that it decides on; reasons: all that it gives."""

    decide: Callable[[Case], Found]
    what: str
    reasons: tuple[Reason, ...] = ()


ORDER = (
    Check(
        arrival.forwarded,
        "forwarded packets: they came in by an interface, without the host's stamp; but for "
        "hairpins (3)",
    ),
    Check(arrival.off, "packets to a pod in `off`"),
    Check(
        new_flows.hairpin,
        "SYNs with the sequence number of one that a host process has sent, not longer than ten "
        "seconds ago and without an answer: hairpins",
        (*(Reason.STRAY, Reason.RULE, Reason.PROBE, Reason.DEAD_MAN), Reason.HAIRPIN),
    ),
    Check(
        arrival.changed_later,
        "frames of packet sockets whose bytes the kernel is to change (a pending checksum)",
        (Reason.UNPARSABLE,),
    ),
    Check(
        arrival.unreadable,
        "frames that do not show their transport header: VLAN tags that are written into the frame "
        "(by no VLAN interface), unknown EtherTypes, routing "
        "headers with segments left, more than eight extension headers",
        (Reason.UNPARSABLE,),
    ),
    Check(arrival.arp, "ARP, but requests and replies that a process wrote", (Reason.ARP,)),
    Check(
        arrival.false_checksum,
        "packets that came in again with a pending checksum in their headers",
        (Reason.UNPARSABLE,),
    ),
    Check(arrival.no_ports, "UDP, SCTP and the like without ports", (Reason.UNPARSABLE,)),
    Check(
        arrival.link_control,
        "neighbour discovery, MLD and IGMP, unless a process wrote them",
        (Reason.CONTROL,),
    ),
    Check(
        arrival.destination,
        "packets to no address of the pod, nor of a client for which it may route",
        (Reason.STRAY,),
    ),
    Check(flows.tcp_fragment, "fragments of TCP", (Reason.FRAGMENT,)),
    Check(flows.tcp_header, "TCP without a whole header", (Reason.UNPARSABLE,)),
    Check(flows.path_test, "SYNs to port 0", (Reason.PATH_TEST,)),
    Check(
        flows.established,
        "other TCP segments: of a TCP socket, of the kernel, or without a socket they pass",
        (Reason.ESTABLISHED, *DROPS),
    ),
    Check(
        flows.forwarded_fragment,
        "IPv6 fragments without socket, interface and stamp",
        (Reason.FORWARDED,),
    ),
    Check(flows.icmp_error, "ICMP errors, unless a process wrote them", (Reason.CONTROL,)),
    Check(flows.redirect, "ICMP redirects", DROPS),
    Check(
        flows.later_fragment,
        "later fragments: they pass if the first one passed, by the same way from the same socket",
        (Reason.REPLY, Reason.GRACE, Reason.FRAGMENT),
    ),
    Check(
        flows.reply,
        "answers to the pod, from a socket that may speak in this name",
        (Reason.REPLY,),
    ),
    Check(flows.grace, "what may be such an answer, during the grace period", (Reason.GRACE,)),
    Check(new_flows.behind_pod, "new flows to clients for which the pod routes", DROPS),
    Check(
        new_flows.admitted_before,
        "packets that a program on a device of the host admitted",
        (Reason.RULE, Reason.PROBE, *MAY_BE),
    ),
    Check(new_flows.rule, "what a rule admits", (Reason.RULE, Reason.PROBE, *MAY_BE)),
    Check(new_flows.dead_man, "everything, if no agent has run for too long", (Reason.DEAD_MAN,)),
    Check(
        new_flows.switch, "packets without an origin, on a node with Open vSwitch", (Reason.SWITCH,)
    ),
    Check(new_flows.past_relay, "in `strict`, the kubelet past the relay", (Reason.STRICT,)),
    Check(new_flows.rest, "everything else", DROPS),
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
            is_hosts = check.decide is arrival.off
            return Answer(None, leaving_stamp(case) if is_hosts else Stamp.NONE)
    assert isinstance(reason, Reason)
    assert reason in check.reasons, (check, reason)
    verdict = Verdict.PASS
    if reason.is_drop:
        verdict = Verdict.WOULD_DROP if case.gate.mode is Mode.AUDIT else Verdict.DROP
    elif case.packet.fragment == 0 and reason not in UNRECORDED and (whole := case.fragmented):
        state.fragments[whole] = now_ns
    return Answer((verdict, reason), leaving_stamp(case))


def leaving_stamp(case: Case) -> Stamp:
    if case.has_no_origin:
        return Stamp.NONE
    if case.is_hand_made:
        return Stamp.HAND_MADE
    is_proven = case.socket is not None or case.stamp in PLAIN_STAMPS
    return Stamp.PLAIN if is_proven else Stamp.UNPROVEN


def stamp_from_pod(stamp: Stamp) -> Stamp:
    """What is left of the stamp of a packet from the pod, which may forward it or have written the
    stamp itself: nothing that a pod gains by."""
    if stamp in (Stamp.NONE, Stamp.HAND_MADE):
        return stamp
    return Stamp.UNPROVEN

"""The specification of the relay's programs (bpf/src/relay.c): which packets pass the two ends of
its pair, and which connections of host processes go to it.

tests/kernel/test_relay_model.py compares the programs with it.
"""

import dataclasses
import enum

from tests.model.facts import NOWHERE, Sent, State
from tests.model.hooks import Call
from tests.model.packet import TCP, parse

SOLICITATION, ADVERTISEMENT = 135, 136
FLAGS_END = 14
"""Of a TCP header, in bytes."""


def is_from_host(sent: Sent) -> bool:
    """Towards the relay, at the host's end: what has come in by an interface is a pod's, or another
    machine's, and would be past NetworkPolicy behind the relay. Any of these may forge a stamp."""
    return sent.ingress == 0


class Held(enum.Enum):
    """What a frame is at the relay's end, and whether it passes."""

    ARP = "arp", True
    SEGMENT = "segment", True
    """Of a connection that is open: no SYN."""
    NEIGHBOUR = "neighbour", True
    """Neighbour discovery, of which router advertisements are no part."""
    UNREADABLE = "unreadable", False
    FRAGMENT = "fragment", False
    """Which would hide the flags."""
    SYN = "syn", False
    """Or TCP that does not show its flags. The relay's packet socket has seen it, and sends it
    again when the pod has accepted."""
    OTHER = "other", False

    @property
    def passes(self) -> bool:
        return self.value[1]


def hold(frame: bytes, *, is_tagged: bool) -> Held:
    packet = None if is_tagged else parse(frame)
    if packet is None:
        return Held.UNREADABLE
    if packet.family == 0:
        return Held.ARP
    if packet.fragment is not None:
        return Held.FRAGMENT
    if packet.protocol == TCP:
        may_be_syn = len(packet.payload) < FLAGS_END or packet.is_syn
        return Held.SYN if may_be_syn else Held.SEGMENT
    is_discovery = packet.family == 6 and packet.icmp_type in (SOLICITATION, ADVERTISEMENT)
    return Held.NEIGHBOUR if is_discovery else Held.OTHER


@dataclasses.dataclass(frozen=True, slots=True)
class Redirection:
    """is_to_relay: instead of to the pod; recorded: where else a kubelet's socket goes while a
    relay serves, by which the pod's gate knows it: NOWHERE if it is bound to an interface."""

    is_to_relay: bool = False
    recorded: bytes | None = None


def connect(call: Call, state: State) -> Redirection:
    """Of the identified kubelet's TCP sockets only; the hooks never reject."""
    is_kubelet = state.node.is_kubelet_cgroup(call.cgroup) and state.is_netns_known
    if not is_kubelet or call.protocol != TCP or not state.is_relay_alive:
        return Redirection()
    if not {(call.to, call.port), (call.to, 0)} & state.proxied.keys():
        return Redirection(recorded=call.to)
    return Redirection(recorded=NOWHERE) if call.has_interface else Redirection(is_to_relay=True)

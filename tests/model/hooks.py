"""The specification of the hooks at connect(2), sendmsg(2), setsockopt(2) and socket(2): which
calls of host processes they reject, and what they record of a socket. What the gate makes of that
is in gate.py. The relay's hooks are in relay.py.

tests/kernel/test_hook_model.py and test_socket_model.py make the same calls, with hooks attached.
"""

import dataclasses
from collections.abc import Callable

from bpf.rule_evaluation import Cgroup, NewFlow, find_rule
from bpf.verdicts import Mode, Reason, Verdict
from tests.model.facts import NOWHERE, Socket, State
from tests.model.packet import ANY_IPV4, TCP, UDP


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """To this address and port, with a socket of this protocol in the host's network namespace.

    source: of a datagram: the address that the call names, or that the socket is bound to; None if
    the kernel chooses it. has_interface: the socket is bound to one.
    """

    cgroup: Cgroup
    protocol: int
    to: bytes
    port: int
    source: bytes | None = None
    has_interface: bool = False


ALLOWED = "allowed"
DENIED = "rejected, and counted by address"
Found = Reason | str | None


def tunnel(call: Call, state: State, now_ns: int) -> Found:
    is_guarded = call.protocol == UDP and call.port in state.node.tunnel_ports
    is_open = state.node.is_dead_man_expired(now_ns)
    return Reason.TUNNEL if is_guarded and not is_open else None


def other_protocol(call: Call, state: State, now_ns: int) -> Found:
    return None if call.protocol == TCP else ALLOWED


def host_probe(call: Call, state: State, now_ns: int) -> Found:
    is_kubelet = state.node.is_kubelet_cgroup(call.cgroup) and not state.node.is_stale(now_ns)
    return DENIED if is_kubelet and (call.to, call.port) in state.denied_host_probes else None


def other_path(call: Call, state: State, now_ns: int) -> Found:
    is_ipv4 = call.to.startswith(ANY_IPV4[:12])
    return ALLOWED if call.has_interface and is_ipv4 else None


def rule(call: Call, state: State, now_ns: int) -> Found:
    gate, node = state.owners.get(call.to), state.node
    if gate is None or gate.mode < Mode.ENFORCE:
        return ALLOWED
    is_kubelet = node.may_be_kubelet(call.cgroup, now_ns)
    flow = NewFlow(call.protocol, call.port, call.cgroup, is_kubelet=is_kubelet)
    is_admitted = find_rule(gate.rules, flow) is not None or node.is_dead_man_expired(now_ns)
    return ALLOWED if is_admitted else Reason.NODE


Check = Callable[[Call, State, int], Found]
CONNECT: tuple[Check, ...] = (tunnel, other_protocol, host_probe, other_path, rule)
SEND: tuple[Check, ...] = (tunnel, other_protocol)


def evaluate(order: tuple[Check, ...], call: Call, state: State, now_ns: int) -> Found:
    """The first answer of these checks."""
    return next(found for check in order if (found := check(call, state, now_ns)) is not None)


def record_source(socket: Socket, source: bytes | None, state: State) -> Socket:
    """The socket with what a datagram adds to its record, also if the call is rejected."""
    if source in (None, NOWHERE, ANY_IPV4) or source.startswith(state.own):
        return socket
    if socket.foreign_sources == 2 or source == socket.foreign_source:
        return socket
    first = socket.foreign_source or source
    return dataclasses.replace(
        socket, foreign_source=first, foreign_sources=socket.foreign_sources + 1
    )


# ----------------------------------------------------------------------- options, and raw sockets

PACKET_OPTIONS, XDP_OPTIONS = 263, 283
EVASIONS = {(PACKET_OPTIONS, 20), (XDP_OPTIONS, 3), (XDP_OPTIONS, 4)}
"""PACKET_QDISC_BYPASS, XDP_TX_RING and XDP_UMEM_REG: frames that pass no gate."""


def set_option(level: int, option: int, state: State, now_ns: int) -> Found:
    """Whatever the mode of any pod: a socket keeps the option."""
    is_evasion = (level, option) in EVASIONS and state.is_netns_known
    return Reason.EVASION if is_evasion and not state.node.is_dead_man_expired(now_ns) else ALLOWED


def create_raw(cgroup: Cgroup, state: State, now_ns: int) -> Verdict:
    """A raw or packet socket, of the host's namespace. A PASS is not counted."""
    node, policies = state.node, state.raw_socket_creators
    is_admitted = cgroup.id in policies or any(policies.get(each) for each in cgroup.ancestors)
    if not state.is_netns_known or not node.is_in_pod(cgroup) or is_admitted:
        return Verdict.PASS
    is_denied = state.denies_raw_sockets and not node.is_dead_man_expired(now_ns)
    return Verdict.DROP if is_denied else Verdict.WOULD_DROP

"""Which flows between a pod and a witness show that an engine has programmed the pod's policies.

A flow that must be dropped shows it; one that must be admitted shows that the engine does not just
drop everything, and that the path works. Each is chosen so that only the pod's own policies can
drop it: where policies of the witness would, or may, a drop shows nothing about the pod.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from agent.network_policy.objects import Direction, NetworkPolicy, Port, Protocol
from agent.network_policy.verdicts import End, Verdict, decide, isolating
from bpf.rules import MAX_PORT

# SYNs disturb servers less than datagrams, which they would read. No SCTP: many engines and kernels
# lack it.
_PROTOCOLS: Final[tuple[Protocol, ...]] = ("TCP", "UDP")
_OPPOSITE: Final[dict[Direction, Direction]] = {"Ingress": "Egress", "Egress": "Ingress"}


class Flow(msgspec.Struct, frozen=True, gc=False):
    """A destination port."""

    protocol: Protocol
    port: int


class Checks(msgspec.Struct, frozen=True):
    """Of one direction in which the pod is isolated."""

    direction: Direction
    policies: tuple[str, ...]
    """ "namespace/name" of those that isolate it, sorted."""
    dropped: Flow | None
    """None: no flow is dropped by the pod's policies and certainly not by the witness's."""
    admitted: Flow | None
    """None: no flow is certainly admitted by both."""


def plan(policies: Iterable[NetworkPolicy], pod: End, witness: End) -> tuple[Checks, ...]:
    """The flows to try, for each direction in which the pod is isolated; else empty.

    `pod` and `witness` have addresses of one family. Ingress flows are from the witness, egress
    flows to it.
    """
    given = tuple(policies)
    directions: tuple[Direction, ...] = ("Ingress", "Egress")
    return tuple(
        _checks(direction, own, isolating(given, witness, _OPPOSITE[direction]), pod, witness)
        for direction in directions
        if (own := isolating(given, pod, direction))
    )


def _checks(
    direction: Direction,
    own: list[NetworkPolicy],
    witness_policies: list[NetworkPolicy],
    pod: End,
    witness: End,
) -> Checks:
    destination = pod if direction == "Ingress" else witness
    opposite = _OPPOSITE[direction]
    dropped: Flow | None = None
    admitted: Flow | None = None
    for flow in _candidates(direction, own, opposite, witness_policies, destination):
        if dropped and admitted:
            break
        by_witness = decide(witness_policies, opposite, pod, destination, flow.protocol, flow.port)
        if by_witness is not Verdict.ADMITTED:
            continue
        match decide(own, direction, witness, destination, flow.protocol, flow.port):
            case Verdict.DROPPED:
                dropped = dropped or flow
            case Verdict.ADMITTED:
                admitted = admitted or flow
            case Verdict.UNDEFINED:
                pass
    names = tuple(sorted(policy.full_name for policy in own))
    return Checks(direction, names, dropped, admitted)


def _candidates(
    direction: Direction,
    own: list[NetworkPolicy],
    opposite: Direction,
    witness_policies: list[NetworkPolicy],
    destination: End,
) -> Iterator[Flow]:
    """One port at least of each range in which all verdicts are the same, those first that
    the destination does not declare. Datagrams go to no declared port."""
    entries = [
        *_entries(own, direction),
        *_entries(witness_policies, opposite),
    ]
    ports = {1, MAX_PORT}
    for entry in entries:
        if isinstance(entry.port, int):
            last = entry.end_port or entry.port
            ports |= {entry.port - 1, entry.port, last, last + 1}
    for declared in destination.ports:
        ports |= {declared.port - 1, declared.port, declared.port + 1}
    valid = sorted((port for port in ports if 1 <= port <= MAX_PORT), reverse=True)
    for protocol in _PROTOCOLS:
        taken = {one.port for one in destination.ports if one.protocol == protocol}
        yield from (Flow(protocol, port) for port in valid if port not in taken)
        if protocol == "TCP":
            yield from (Flow(protocol, port) for port in valid if port in taken)


def _entries(policies: list[NetworkPolicy], direction: Direction) -> Iterator[Port]:
    for policy in policies:
        for rule in policy.rules(direction):
            yield from rule.ports or ()

"""Which flows between a pod and a witness show that an engine has programmed the pod's policies.

A flow that must be dropped shows it; one that must be admitted shows that the engine does not just
drop everything, and that the path works. Each is chosen so that only the pod's own policies can
drop it: where policies of the witness would, or may, a drop shows nothing about the pod.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from agent.network_policy.objects import Direction, Protocol
from agent.network_policy.policy_set import PolicySet, Selected
from agent.network_policy.verdicts import End, Verdict
from bpf.rules import MAX_PORT

# SYNs disturb servers less than datagrams, which they would read. No SCTP: many engines and kernels
# lack it.
_PROTOCOLS: Final[tuple[Protocol, ...]] = ("TCP", "UDP")
_OPPOSITE: Final[dict[Direction, Direction]] = {"Ingress": "Egress", "Egress": "Ingress"}


class Flow(msgspec.Struct, frozen=True, gc=False):
    """A destination port."""

    protocol: Protocol
    port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.port}"


class Checks(msgspec.Struct, frozen=True):
    """Of one direction in which policies decide about the pod."""

    direction: Direction
    policies: tuple[str, ...]
    """As `Selected.names`."""
    dropped: Flow | None
    """None: no flow is dropped by the pod's policies and certainly not by the witness's."""
    admitted: Flow | None
    """None: no flow is certainly admitted by both."""


def plan(policies: PolicySet, pod: End, witness: End) -> tuple[Checks, ...]:
    """The flows to try, for each direction in which policies decide about the pod; else empty.

    `pod` and `witness` have addresses of one family. Ingress flows are from the witness, egress
    flows to it.
    """
    directions: tuple[Direction, ...] = ("Ingress", "Egress")
    return tuple(
        _checks(own, policies.select(witness, _OPPOSITE[direction]), pod, witness)
        for direction in directions
        if (own := policies.select(pod, direction)).names
    )


def _checks(own: Selected, of_witness: Selected, pod: End, witness: End) -> Checks:
    destination = pod if own.direction == "Ingress" else witness
    dropped: Flow | None = None
    admitted: Flow | None = None
    for flow in _candidates(own, of_witness, destination):
        if dropped and admitted:
            break
        by_witness = of_witness.decide(pod, destination, flow.protocol, flow.port)
        if by_witness is not Verdict.ADMITTED:
            continue
        match own.decide(witness, destination, flow.protocol, flow.port):
            case Verdict.DROPPED:
                dropped = dropped or flow
            case Verdict.ADMITTED:
                admitted = admitted or flow
            case Verdict.UNDEFINED:
                pass
    return Checks(own.direction, own.names, dropped, admitted)


def _candidates(own: Selected, of_witness: Selected, destination: End) -> Iterator[Flow]:
    """One port at least of each range in which all verdicts are the same, those first that
    the destination does not declare. Datagrams go to no declared port."""
    ports = {1, MAX_PORT}
    for first, last in (*own.port_ranges(), *of_witness.port_ranges()):
        ports |= {first, last, last + 1}
    for declared in destination.ports:
        ports |= {declared.port, declared.port + 1}
    valid = sorted((port for port in ports if 1 <= port <= MAX_PORT), reverse=True)
    for protocol in _PROTOCOLS:
        taken = {one.port for one in destination.ports if one.protocol == protocol}
        yield from (Flow(protocol, port) for port in valid if port not in taken)
        if protocol == "TCP":
            yield from (Flow(protocol, port) for port in valid if port in taken)

"""Selects which endpoints of a service's port this node uses: kube-proxy's rules as pure functions.

The source of each is pkg/proxy/topology.go of Kubernetes (CategorizeEndpoints and
topologyModeFromHints), as of 1.34. Each family is evaluated alone: kube-proxy runs once for each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar


class TopologyCandidate(Protocol):
    """The properties of an endpoint that the rules depend on."""

    @property
    def is_local(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_last_resort(self) -> bool:
        """Serving and terminating."""

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones of its hints; empty without hints."""

    @property
    def nodes(self) -> tuple[str, ...]: ...


CandidateT = TypeVar("CandidateT", bound=TopologyCandidate)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTopology:
    """Where this node is. zone: empty if its label is missing."""

    node: str
    zone: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TrafficPolicies:
    """Which traffic of a port stays on the node that it reaches."""

    is_internal_local: bool = False
    is_external_local: bool = False
    is_reachable_from_outside: bool = False
    """By a node port, or an external IP or a load balancer's IP of this family."""

    @property
    def uses_cluster(self) -> bool:
        """Also where external traffic stays local: this node's own external traffic does not."""
        return not self.is_internal_local or self.is_reachable_from_outside

    @property
    def uses_local(self) -> bool:
        return self.is_internal_local or (self.is_external_local and self.is_reachable_from_outside)


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointChoice:
    """Indexes of the endpoints to use, by the kind of traffic."""

    internal: frozenset[int] = frozenset()
    external: frozenset[int] = frozenset()
    external_from_node: frozenset[int] = frozenset()
    has_any: bool = False
    """Whether any endpoint on any node could be used."""


def choose(
    endpoints: Sequence[CandidateT], policies: TrafficPolicies, topology: NodeTopology
) -> EndpointChoice:
    """Apply the rules to all endpoints of one port and family."""
    cluster = _cluster(endpoints, topology) if policies.uses_cluster else frozenset[int]()
    local = _local(endpoints) if policies.uses_local else frozenset[int]()
    has_any = bool(cluster) or (
        policies.uses_local and any(one.is_ready or one.is_last_resort for one in endpoints)
    )
    internal = local if policies.is_internal_local else cluster
    if not policies.is_reachable_from_outside:
        return EndpointChoice(internal=internal, has_any=has_any)
    return EndpointChoice(
        internal=internal,
        external=local if policies.is_external_local else cluster,
        external_from_node=cluster,
        has_any=has_any,
    )


def _cluster(endpoints: Sequence[CandidateT], topology: NodeTopology) -> frozenset[int]:
    """Ready endpoints whose hints select this node; if none is ready, all that still serve."""
    ready = [index for index, one in enumerate(endpoints) if one.is_ready]
    if not ready:
        return frozenset(index for index, one in enumerate(endpoints) if one.is_last_resort)
    if near := _hinted([endpoints[index].nodes for index in ready], topology.node):
        return frozenset(ready[position] for position in near)
    if near := _hinted([endpoints[index].zones for index in ready], topology.zone):
        return frozenset(ready[position] for position in near)
    return frozenset(ready)


def _local(endpoints: Sequence[CandidateT]) -> frozenset[int]:
    """The node's own ready endpoints; if none is ready, those that still serve. Hints do not
    count."""
    own = [(index, one) for index, one in enumerate(endpoints) if one.is_local]
    return frozenset(index for index, one in own if one.is_ready) or frozenset(
        index for index, one in own if one.is_last_resort
    )


def _hinted(hints: Sequence[tuple[str, ...]], here: str) -> list[int]:
    """Positions of the hints that name this place; none where a single hint is missing, since the
    hints are then being added, being removed, or inconsistent (the safeguards of KEP-2433)."""
    if not all(hints):
        return []
    return [position for position, names in enumerate(hints) if here in names]

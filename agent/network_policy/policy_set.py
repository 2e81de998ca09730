"""All policies of the cluster, and which of them decide about one pod."""

import functools
from collections.abc import Iterator

import msgspec

from agent.network_policy import tiers
from agent.network_policy.objects import Direction, NetworkPolicy, Protocol
from agent.network_policy.verdicts import End, Verdict, decide, isolating
from agent.policy.cluster_network_policies.api_types import KIND, ClusterNetworkPolicy, Tier


class Selected(msgspec.Struct, frozen=True):
    """The policies of one pod in one direction. cluster: in the order of evaluation."""

    direction: Direction
    network: tuple[NetworkPolicy, ...]
    cluster: tuple[ClusterNetworkPolicy, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """ "namespace/name" of NetworkPolicies, and "ClusterNetworkPolicy name"; sorted."""
        of_namespaces = (policy.metadata.full_name for policy in self.network)
        return tuple(sorted((*of_namespaces, *(f"{KIND} {one.name}" for one in self.cluster))))

    def decide(self, other: End, destination: End, protocol: Protocol, port: int) -> Verdict:
        """On a flow from or to the `other` end: Admin tier, NetworkPolicies, Baseline tier."""

        def by_tier(tier: Tier) -> Verdict | None:
            return tiers.decide(
                *(self.cluster, tier, self.direction, other, destination, protocol, port)
            )

        verdict = by_tier(Tier.ADMIN)
        if verdict is None and self.network:
            verdict = decide(self.network, self.direction, other, destination, protocol, port)
        if verdict is None:
            verdict = by_tier(Tier.BASELINE)
        return Verdict.ADMITTED if verdict is None else verdict

    def port_ranges(self) -> Iterator[tuple[int, int]]:
        """The first and last port of each entry that names numbers."""
        for policy in self.network:
            for rule in policy.rules(self.direction):
                for entry in rule.ports or ():
                    if isinstance(entry.port, int):
                        yield entry.port, entry.end_port or entry.port
        yield from tiers.port_ranges(self.cluster)


class PolicySet(msgspec.Struct, frozen=True, dict=True):
    """cluster: in the order of evaluation."""

    network: tuple[NetworkPolicy, ...] = ()
    cluster: tuple[ClusterNetworkPolicy, ...] = ()

    @functools.cached_property
    def _by_namespace(self) -> dict[str, list[NetworkPolicy]]:
        found: dict[str, list[NetworkPolicy]] = {}
        for policy in self.network:
            found.setdefault(policy.metadata.namespace, []).append(policy)
        return found

    def select(self, end: End, direction: Direction) -> Selected:
        """The policies that decide about flows of this pod."""
        own = self._by_namespace.get(end.namespace, ())
        return Selected(
            direction,
            tuple(isolating(own, end, direction)),
            tuple(tiers.concerning(self.cluster, end, direction)),
        )

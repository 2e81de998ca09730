"""What the relay is to carry: of each pod in strict its addresses, and the ports that are its own.

A redirect goes by address and port alone. So where two pods of the node have one address, a port
that both want cannot be told apart, and neither gets it; whatever only one of them wants is its.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import msgspec

from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.pod_state import PodState
from agent.relay.messages import RelayTargetSpec
from bpf import rules
from bpf.verdicts import Mode

ANY_PORT = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that the relay is to carry now."""

    targets: tuple[RelayTargetSpec, ...]
    shared: Mapping[str, str]
    """By pod's uid: one sentence about ports that are not its own alone."""


def plan_of(pods: Iterable[PodState]) -> Plan:
    """pods: all of the node, since those that are not in strict have addresses, too."""
    pods = list(pods)
    claims = _Claims(pods)
    targets = []
    shared = {}
    for guarded in pods:
        if why_never(guarded) is not None or not stands(guarded):
            continue
        for target in wanted_targets(guarded):
            granted = claims.granted(guarded, target.address, target.claims)
            if granted:
                targets.append(msgspec.structs.replace(target, claims=granted))
            if len(granted) < len(target.claims):
                shared[guarded.pod.uid] = claims.explain(guarded, target.address, granted)
    return Plan(tuple(targets), shared)


def wanted_targets(guarded: PodState) -> tuple[RelayTargetSpec, ...]:
    """One for each address of the pod, as if nobody else had it; none where nothing is declared."""
    netns = guarded.netns
    admitted = kubelet_rules(guarded.pod.spec)
    if netns is None or not admitted:
        return ()
    claims = _claims_of(guarded)
    return tuple(
        RelayTargetSpec(
            key=f"{guarded.pod.uid} {address}",
            netns_path=netns.path,
            netns_device=netns.device,
            netns_inode=netns.inode,
            address=address,
            ports=tuple((rule.first_port, rule.last_port) for rule in admitted),
            claims=claims,
        )
        for address in guarded.own_addresses
    )


def uid_of(key: str) -> str:
    """The pod's uid, of a target's key."""
    return key.rpartition(" ")[0]


def wants_strict(guarded: PodState) -> bool:
    """Whether strict is the pod's mode, and a gate is what it gets."""
    return guarded.pod.mode is Mode.STRICT and not guarded.pod.host_network


def stands(guarded: PodState) -> bool:
    """Whether the pod's gates stand, without which a relay would be no closure."""
    return guarded.gated_netns is not None and bool(guarded.gates)


def why_never(guarded: PodState) -> str | None:
    """One sentence about a pod to which nothing is carried, however the relay is."""
    network = guarded.network
    if not wants_strict(guarded):
        return "its mode is not strict."
    if not guarded.pod.is_relayed:
        return "the annotation podgate.io/relay keeps the relay off."
    if network is not None and network.taps:
        return (
            f"the pod runs in a virtual machine behind {', '.join(network.taps)}, which cannot be "
            "dialled from its network namespace."
        )
    if network is not None and not guarded.own_addresses and kubelet_rules(guarded.pod.spec):
        if network.probe_addresses:
            return "no address in the pod's network namespace is confirmed as its own."
        return "no address of the pod is on an interface in its network namespace."
    return None


class _Claims:
    """Who wants which port of an address, over all pods of the node."""

    def __init__(self, pods: list[PodState]) -> None:
        self._wishes: dict[str, dict[str, tuple[int, ...]]] = collections.defaultdict(dict)
        self._names = {guarded.pod.uid: guarded.pod.full_name for guarded in pods}
        self._carried = {
            guarded.pod.uid for guarded in pods if why_never(guarded) is None and stands(guarded)
        }
        for guarded in pods:
            if not guarded.pod.host_network:
                for address in guarded.own_addresses:
                    self._wishes[address][guarded.pod.uid] = _claims_of(guarded)

    def granted(self, guarded: PodState, address: str, claims: tuple[int, ...]) -> tuple[int, ...]:
        uid = guarded.pod.uid
        return tuple(port for port in claims if not self._contenders(uid, address, port))

    def explain(self, guarded: PodState, address: str, granted: tuple[int, ...]) -> str:
        uid = guarded.pod.uid
        missing = [port for port in self._wishes[address][uid] if port not in granted]
        others = sorted(
            {
                self._names[other]
                for port in missing
                for other in self._contenders(uid, address, port)
            }
        )
        ports = ", ".join("others" if port == ANY_PORT else str(port) for port in missing)
        return (
            f"pod {' and pod '.join(others)} of this node has the address {address} as well, so "
            f"the kubelet's connections to these ports cannot be told apart: {ports}."
        )

    def _contenders(self, uid: str, address: str, port: int) -> set[str]:
        """Other pods for which what is redirected by this claim may be meant."""
        wishes = self._wishes[address]
        return {
            other
            for other in wishes.keys() - {uid}
            if port in wishes[other] or (port == ANY_PORT and self._lacks(other, address))
        }

    def _lacks(self, uid: str, address: str) -> bool:
        """Whether a port of this pod is not redirected to it: who has all others would get it."""
        wishes = self._wishes[address]
        if uid not in self._carried:
            return bool(wishes[uid])
        others = set().union(*(wishes[other] for other in wishes if other != uid))
        return not others.isdisjoint(wishes[uid])


def _claims_of(guarded: PodState) -> tuple[int, ...]:
    """Each port that the pod declares, and 0 where any port is admitted."""
    spec = guarded.pod.spec
    admitted = kubelet_rules(spec)
    if not admitted:
        return ()
    is_any = any((r.first_port, r.last_port) == (0, rules.MAX_PORT) for r in admitted)
    return (*sorted(spec.declared.ports), *((ANY_PORT,) if is_any else ()))

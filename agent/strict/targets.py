"""Desired targets of the relay: addresses of pods, each with the ports that the pod declares.

Pods in strict have one for each address, pods in enforce for those at which the kubelet does not
reach them (`agent/strict/unreached.py`).

A redirect knows only address and port. So if two pods of the node have the same address, a port
that both declare is ambiguous, and redirected to neither; the other ports are redirected.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.pod_state import PodState
from agent.relay.messages import Answer, RelayTargetSpec
from agent.strict import unreached as unreached_pods
from bpf import rules
from bpf.verdicts import Mode

ANY_PORT = 0
NOT_STRICT = "Mode is not strict."


@dataclasses.dataclass(frozen=True, slots=True)
class RelayPlan:
    """All desired targets."""

    targets: tuple[RelayTargetSpec, ...]
    conflicts: Mapping[str, str]
    """By pod's uid: one sentence about ambiguous ports."""
    unreached: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """By uid of pods in enforce: addresses at which they need the relay."""


Answers = Callable[[str, str], tuple[Answer, ...]]
"""What the relay is to answer, by the pod's uid and address."""


def plan_of(
    pods: Iterable[PodState],
    answers: Answers = lambda uid, address: (),
    *,
    proxies_enforced: bool = True,
    https_hooks: bool = True,
) -> RelayPlan:
    """pods: all pods of the node, since those without a relay have addresses, too.

    proxies_enforced: whether pods in enforce may have a relay; https_hooks: whether their https
    hooks are a reason for one.
    """
    pods = list(pods)
    unreached = {}
    if proxies_enforced:
        unreached = unreached_pods.unreached_addresses(pods, https_hooks=https_hooks)
    proxied = {state.pod.uid: _proxied_addresses(state, unreached) for state in pods}
    claims = _PortClaims(pods, proxied)
    targets = []
    conflicts = {}
    for state in pods:
        for target in desired_targets(state, proxied[state.pod.uid]):
            granted = claims.granted(state, target.address, target.claims)
            if granted:
                answered = answers(state.pod.uid, target.address)
                targets.append(msgspec.structs.replace(target, claims=granted, answers=answered))
            if len(granted) < len(target.claims):
                conflicts[state.pod.uid] = claims.explain(state, target.address, granted)
    return RelayPlan(tuple(targets), conflicts, unreached)


def _proxied_addresses(state: PodState, unreached: Mapping[str, frozenset[str]]) -> Collection[str]:
    if excluded_reason(state) is not None or not is_gated(state):
        return ()
    if state.pod.mode is Mode.STRICT:
        return state.own_addresses
    return unreached.get(state.pod.uid, ())


def desired_targets(state: PodState, addresses: Collection[str]) -> tuple[RelayTargetSpec, ...]:
    """One for each of these addresses, whatever other pods claim; none without probes or hooks."""
    netns = state.netns
    admitted = kubelet_rules(state.pod.spec)
    if netns is None or not admitted:
        return ()
    claims = _claims_of(state)
    return tuple(
        RelayTargetSpec(
            key=f"{state.pod.uid} {address}",
            netns_path=netns.path,
            netns_device=netns.device,
            netns_inode=netns.inode,
            address=address,
            ports=tuple((rule.first_port, rule.last_port) for rule in admitted),
            claims=claims,
            # A probe may name a host that leads to the pod, such as a service's address, and a
            # healthy pod must not be restarted for that.
            admits_translated=bool(state.pod.spec.errors),
        )
        for address in state.own_addresses
        if address in addresses
    )


def uid_of(key: str) -> str:
    """The pod's uid in a target's key."""
    return key.rpartition(" ")[0]


def is_gated(state: PodState) -> bool:
    """Whether the pod's gates are attached, without which a relay closes nothing."""
    return state.gated_netns is not None and bool(state.gates)


def excluded_reason(state: PodState) -> str | None:
    """One sentence about a pod that never gets a relay, or None."""
    network = state.network
    if state.pod.host_network or state.pod.mode < Mode.ENFORCE:
        return NOT_STRICT
    if not state.pod.is_relayed:
        return 'Annotation podgate.io/relay is "off".'
    if network is not None and network.taps:
        return (
            f"The pod runs in a virtual machine behind {', '.join(network.taps)}; the relay cannot "
            "dial it from the network namespace."
        )
    if network is not None and not state.own_addresses and kubelet_rules(state.pod.spec):
        if network.probe_addresses:
            return "No address in the pod's network namespace is confirmed as its own."
        return "No pod address is on an interface of the network namespace."
    return None


class _PortClaims:
    """The ports that each pod of the node claims, by address."""

    def __init__(self, pods: list[PodState], proxied: Mapping[str, Collection[str]]) -> None:
        """proxied: by uid, the addresses at which the relay would proxy to the pod."""
        self._claims: dict[str, dict[str, tuple[int, ...]]] = collections.defaultdict(dict)
        self._names = {state.pod.uid: state.pod.full_name for state in pods}
        self._proxied = proxied
        for state in pods:
            if not state.pod.host_network:
                for address in state.own_addresses:
                    self._claims[address][state.pod.uid] = _claims_of(state)

    def granted(self, state: PodState, address: str, claims: tuple[int, ...]) -> tuple[int, ...]:
        uid = state.pod.uid
        return tuple(port for port in claims if not self._contenders(uid, address, port))

    def explain(self, state: PodState, address: str, granted: tuple[int, ...]) -> str:
        uid = state.pod.uid
        missing = [port for port in self._claims[address][uid] if port not in granted]
        others = sorted(
            {
                self._names[other]
                for port in missing
                for other in self._contenders(uid, address, port)
            }
        )
        ports = ", ".join("others" if port == ANY_PORT else str(port) for port in missing)
        return (
            f"Pod {' and pod '.join(others)} has the same address {address}; kubelet connections "
            f"to these ports are ambiguous: {ports}."
        )

    def _contenders(self, uid: str, address: str, port: int) -> set[str]:
        """Other pods to which connections redirected by this claim may belong."""
        claims = self._claims[address]
        return {
            other
            for other in claims.keys() - {uid}
            if port in claims[other] or (port == ANY_PORT and self._has_ungranted(other, address))
        }

    def _has_ungranted(self, uid: str, address: str) -> bool:
        """Whether a port of this pod is not redirected to it, so that `ANY_PORT` would catch it."""
        claims = self._claims[address]
        if address not in self._proxied[uid]:
            return bool(claims[uid])
        others = set().union(*(claims[other] for other in claims if other != uid))
        return not others.isdisjoint(claims[uid])


def _claims_of(state: PodState) -> tuple[int, ...]:
    """Each port that the pod declares, and 0 if any port is admitted."""
    spec = state.pod.spec
    admitted = kubelet_rules(spec)
    if not admitted:
        return ()
    is_any = any((r.first_port, r.last_port) == (0, rules.MAX_PORT) for r in admitted)
    return (*sorted(spec.declared.ports), *((ANY_PORT,) if is_any else ()))

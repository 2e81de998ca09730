"""Desired targets of the relay: addresses of pods, each with the ports that the pod declares.

Pods in strict have one for each address, pods in enforce for those at which the kubelet does not
reach them (`agent/strict/unreached.py`).

Where several pods of the node have one address, `agent/strict/port_grants.py` decides.
`agent/strict/plans.py` keeps the plan of all pods up to date.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping

import msgspec

from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.pod_state import PodState
from agent.relay.messages import Answer, RelayTargetSpec, Sharing
from agent.strict import port_grants
from agent.strict.port_grants import ANY_PORT
from bpf.verdicts import Mode

NOT_STRICT = "Mode is not strict."


@dataclasses.dataclass(frozen=True)
class RelayPlan:
    """All desired targets."""

    targets: tuple[RelayTargetSpec, ...]
    conflicts: Mapping[str, str]
    """By pod's uid: one sentence about ambiguous ports."""
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By uid of pods in enforce that need the relay: why, as a clause."""
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By uid: one sentence about ports that several pods share."""

    @functools.cached_property
    def by_key(self) -> dict[str, RelayTargetSpec]:
        return {target.key: target for target in self.targets}

    @functools.cached_property
    def claimants(self) -> dict[str, str]:
        """By key of targets that share ports: the key of the one that claims them."""
        return {
            request.key: target.key
            for target in self.targets
            if target.sharing
            for request in target.sharing.requests
        }


Answers = Callable[[str, str], tuple[Answer, ...]]
"""What the relay is to answer, by the pod's uid and address."""


class AddressPlanner:
    """Collects the targets of one address."""

    def __init__(
        self,
        unreached: Mapping[str, Collection[str]],
        answers: Answers,
        *,
        proxies_enforced: bool,
    ) -> None:
        """unreached: by uid of pods in enforce, the addresses at which they need the relay."""
        self.targets: list[RelayTargetSpec] = []
        self.conflicts: dict[str, str] = {}
        self.needs: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._unreached = unreached
        self._answers = answers
        self._lowest_mode = Mode.ENFORCE if proxies_enforced else Mode.STRICT

    def add(self, address: str, pods: list[PodState]) -> None:
        """pods: all that have the address."""
        eligible = [state for state in pods if self._is_eligible(state)]
        proxied = [state for state in eligible if self._is_needed(state, address)]
        if len(pods) > 1:
            proxied += self._join(address, pods, eligible, proxied)
        grants = port_grants.grant(address, pods, {state.pod.uid for state in proxied})
        sharing = port_grants.sharing(address, grants.shared, proxied)
        sharers = {request.key for request in sharing.requests} if sharing else set()
        for state in proxied:
            uid = state.pod.uid
            for target in desired_targets(state, [address]):
                claims = grants.ports.get(uid, ())
                if target.key in sharers or claims:
                    self.targets.append(
                        msgspec.structs.replace(
                            target, claims=claims, answers=self._answers(uid, address)
                        )
                    )
            if uid in grants.ambiguous:
                self.conflicts[uid] = _conflict(state, address, pods, grants.ambiguous[uid])
        if sharing:
            self._claim_shared(sharers, sharing)
            self._explain_sharing(address, sharing, proxied)

    def _explain_sharing(self, address: str, sharing: Sharing, pods: list[PodState]) -> None:
        names = {
            port_grants.target_key(state.pod.uid, address): f"pod {state.pod.full_name}"
            for state in pods
        }
        rest = "resets other connections"
        if sharing.otherwise:
            rest = f"proxies other connections to {names[sharing.otherwise]}"
        for state in pods:
            own = port_grants.target_key(state.pod.uid, address)
            others = " and ".join(name for key, name in names.items() if key != own)
            sentence = (
                f"Address {address} is also that of {others}: the relay proxies each http request "
                f"to the pod that it belongs to, and {rest}."
            )
            self.notes[state.pod.uid] = sentence

    def _claim_shared(self, sharers: Container[str], sharing: Sharing) -> None:
        """One of the targets claims the ports for all of them."""
        index, target = next(
            (index, target) for index, target in enumerate(self.targets) if target.key in sharers
        )
        claims = (*target.claims, *sharing.ports)
        self.targets[index] = msgspec.structs.replace(target, claims=claims, sharing=sharing)

    def _is_eligible(self, state: PodState) -> bool:
        """Whether the relay may proxy to the pod."""
        is_high_enough = state.pod.mode >= self._lowest_mode
        is_ready = is_gated(state) and state.inner_ways is not None
        return is_high_enough and is_ready and excluded_reason(state) is None

    def _is_needed(self, state: PodState, address: str) -> bool:
        if state.pod.mode is Mode.STRICT:
            return True
        return address in self._unreached.get(state.pod.uid, ())

    def _join(
        self,
        address: str,
        pods: list[PodState],
        eligible: list[PodState],
        proxied: list[PodState],
    ) -> list[PodState]:
        """Pods in enforce that share a port with one of `proxied`."""
        may_be = {state.pod.uid for state in eligible}
        joined = port_grants.joined(address, pods, {state.pod.uid for state in proxied}, may_be)
        names = " and ".join(f"pod {state.pod.full_name}" for state in proxied)
        for uid in joined:
            self.needs.setdefault(uid, f"The address {address} is also that of {names}")
        return [state for state in eligible if state.pod.uid in joined]


def _conflict(
    state: PodState, address: str, pods: Iterable[PodState], ports: Collection[int]
) -> str:
    """One sentence about ports of a pod that are redirected to no pod."""
    others = sorted(
        other.pod.full_name
        for other in pods
        if other is not state
        and (claims := port_grants.claims_of(other))
        and (ANY_PORT in ports or not set(claims).isdisjoint(ports))
    )
    named = ", ".join("others" if port == ANY_PORT else str(port) for port in ports)
    return (
        f"Pod {' and pod '.join(others)} has the same address {address}; kubelet connections "
        f"to these ports are ambiguous: {named}."
    )


def desired_targets(state: PodState, addresses: Collection[str]) -> tuple[RelayTargetSpec, ...]:
    """One for each of these addresses, whatever other pods claim; none without probes or hooks."""
    netns = state.netns
    admitted = kubelet_rules(state.pod.spec)
    if netns is None or not admitted:
        return ()
    claims = port_grants.claims_of(state)
    return tuple(
        RelayTargetSpec(
            key=port_grants.target_key(state.pod.uid, address),
            netns_path=netns.path,
            netns_device=netns.device,
            netns_inode=netns.inode,
            address=address,
            ports=tuple((rule.first_port, rule.last_port) for rule in admitted),
            claims=claims,
            # A probe may name a host that leads to the pod, such as a service's address, and a
            # healthy pod must not be restarted for that.
            admits_translated=bool(state.pod.spec.errors),
            user=_user(state, address),
        )
        for address in state.own_addresses
        if address in addresses
    )


def _user(state: PodState, address: str) -> int:
    """Whose sockets are to connect: root's, or those of a user that the pod's rules exempt."""
    way = (state.inner_ways or {}).get(address)
    return way.user or 0 if way else 0


def uid_of(key: str) -> str:
    """The pod's uid in a target's key."""
    return key.rpartition(" ")[0]


def is_gated(state: PodState) -> bool:
    """Whether the pod's gates are attached, without which a relay closes nothing."""
    return state.gated_netns is not None and bool(state.gates)


def excluded_reason(state: PodState) -> str | None:
    """One sentence about a pod that never gets a relay, or None."""
    if state.pod.host_network or state.pod.mode < Mode.ENFORCE:
        return NOT_STRICT
    return strict_problem(state)


def strict_problem(state: PodState) -> str | None:
    """Why a pod would stay at enforce in mode strict, one sentence, or None. Only a pod that is
    gated has been tried from inside."""
    network = state.network
    if not state.pod.is_relayed:
        return 'Annotation podgate.io/relay is "off".'
    if network is not None and network.taps:
        return (
            f"The pod runs in a virtual machine behind {', '.join(network.taps)}; the relay cannot "
            "dial it from the network namespace."
        )
    if network is not None and network.is_loopback_down:
        return (
            "The loopback interface of the pod is down, so no connection from inside the pod "
            "arrives; run 'ip link set lo up' in it."
        )
    for address, way in (state.inner_ways or {}).items():
        if way.user is None:
            return (
                f"Connections from inside the pod to {address} are {way.redirection.text}, so the "
                "relay cannot reach the application; have the pod's rules exempt the loopback "
                "interface."
            )
    if network is not None and not state.own_addresses and kubelet_rules(state.pod.spec):
        if network.probe_addresses:
            return "No address in the pod's network namespace is confirmed as its own."
        return "No pod address is on an interface of the network namespace."
    return None

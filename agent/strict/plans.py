"""The plan of the relay's targets, kept up to date: a change of one pod plans its own addresses
again, and no others.

A node's plan takes 5 ms for 100 pods, and while many pods start, each changes several times.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from agent.pods.pod_state import PodState
from agent.relay.messages import RelayTargetSpec
from agent.strict import targets as relay_targets
from agent.strict import unreached
from agent.strict.targets import AddressPlanner, Answers, RelayPlan


@dataclasses.dataclass(frozen=True, slots=True)
class _AddressPlan:
    """What one address adds to a plan, and the facts that it follows from."""

    facts: object
    targets: tuple[RelayTargetSpec, ...]
    conflicts: Mapping[str, str]
    needs: Mapping[str, str]
    notes: Mapping[str, str]


class RelayPlans:
    """The newest plan of all pods of the node, also of those without a relay, since these have
    addresses, too."""

    def __init__(self, answers: Answers = lambda uid, address: (), *, https_hooks: bool = True):
        """https_hooks: whether https hooks of pods in enforce are a reason for the relay."""
        self.current = RelayPlan((), {})
        self.planned = 0
        """Addresses that were planned so far."""
        self._answers = answers
        self._https_hooks = https_hooks
        self._proxies_enforced = True
        self._is_node_blocked = False
        self._shown: dict[str, bool] = {}
        """By uid of pods whose path test shows it: whether the node is blocked from pods."""
        self._unreached: dict[str, frozenset[str]] = {}
        """By uid of pods in enforce: the addresses at which they need the relay."""
        self._addresses: dict[str, tuple[str, ...]] = {}
        """Of each pod, those at which `_pods_at` has it."""
        self._pods_at: dict[str, dict[str, PodState]] = {}
        """By address, in the order of the first plan: its pods by uid."""
        self._parts: dict[str, _AddressPlan] = {}
        """By address."""

    def update(
        self,
        pods: Mapping[str, PodState],
        changed: Collection[str] | None = None,
        *,
        proxies_enforced: bool = True,
    ) -> set[str]:
        """Plan again. Returns the uids of pods whose part of the plan changed, beside those of
        `changed`.

        :param pods: all pods of the node, by uid.
        :param changed: uids of pods that changed, came or went; None for any.
        :param proxies_enforced: whether pods in enforce may have a relay.
        """
        if changed is None or proxies_enforced != self._proxies_enforced:
            changed = [*pods, *(self._addresses.keys() - pods.keys())]
            self._pods_at.clear()
            self._addresses.clear()
        self._proxies_enforced = proxies_enforced
        affected = dict.fromkeys(
            address for uid in changed for address in self._index(uid, pods.get(uid))
        )
        is_blocked = unreached.is_node_blocked(self._shown.values())
        if is_blocked != self._is_node_blocked:
            self._is_node_blocked = is_blocked
            changed, affected = {*changed, *pods}, dict.fromkeys(self._pods_at)
        different = {uid for uid in changed if self._reach(uid, pods.get(uid))}
        is_same = not different
        for address in affected.keys() & self._pods_at.keys():
            if self._plan_address(address):
                different |= self._pods_at[address].keys()
                is_same = False
        for address in self._parts.keys() - self._pods_at.keys():
            del self._parts[address]
            is_same = False
        if not is_same:
            self._join()
        return different

    def _index(self, uid: str, state: PodState | None) -> Collection[str]:
        """Follow the pod's addresses; returns those of now and before."""
        shown = unreached.shows_blocked_node(state) if state else None
        if shown is None:
            self._shown.pop(uid, None)
        else:
            self._shown[uid] = shown
        before = self._addresses.pop(uid, ())
        own = state.own_addresses if state and not state.pod.host_network else ()
        for address in before:
            if address not in own:
                self._pods_at[address].pop(uid)
                if not self._pods_at[address]:
                    del self._pods_at[address]
        if state and own:
            self._addresses[uid] = own
            for address in own:
                # In its place, so that the targets keep their order.
                self._pods_at.setdefault(address, {})[uid] = state
        return {*before, *own}

    def _reach(self, uid: str, state: PodState | None) -> bool:
        """Follow at which addresses the kubelet does not reach the pod; whether that changed."""
        found: frozenset[str] = frozenset()
        if state and self._proxies_enforced:
            found = unreached.unreached_addresses(
                state, is_node_blocked=self._is_node_blocked, https_hooks=self._https_hooks
            )
        before = self._unreached.pop(uid, frozenset())
        if found:
            self._unreached[uid] = found
        return found != before

    def _plan_address(self, address: str) -> bool:
        """Whether its part of the plan changed."""
        pods = self._pods_at[address]
        facts = (self._proxies_enforced, [self._facts(one, address) for one in pods.values()])
        before = self._parts.get(address)
        if before is not None and before.facts == facts:
            return False
        planner = AddressPlanner(
            self._unreached, self._answers, proxies_enforced=self._proxies_enforced
        )
        planner.add(address, list(pods.values()))
        self.planned += 1
        self._parts[address] = _AddressPlan(
            facts, tuple(planner.targets), planner.conflicts, planner.needs, planner.notes
        )
        return True

    def _facts(self, state: PodState, address: str) -> object:
        """All that `AddressPlanner.add` and `port_grants` read of a pod."""
        netns, uid, tested = state.netns, state.pod.uid, state.sandbox_path_test
        return (
            state.pod,
            netns and (netns.path, netns.device, netns.inode),
            state.network,
            state.own_addresses,
            relay_targets.is_gated(state),
            tested and tested.results.get(address),
            address in self._unreached.get(uid, ()),
            self._answers(uid, address),
            state.inner_ways,
        )

    def _join(self) -> None:
        targets: list[RelayTargetSpec] = []
        conflicts: dict[str, str] = {}
        notes: dict[str, str] = {}
        needs = {
            uid: f"The kubelet cannot reach {', '.join(sorted(addresses))} from the host"
            for uid, addresses in self._unreached.items()
        }
        for address in self._pods_at:
            part = self._parts[address]
            targets += part.targets
            conflicts |= part.conflicts
            # The first address is enough.
            for uid, why in part.needs.items():
                needs.setdefault(uid, why)
            for uid, sentence in part.notes.items():
                notes.setdefault(uid, sentence)
        self.current = RelayPlan(tuple(targets), conflicts, needs, notes)


def plan_of(
    pods: Iterable[PodState],
    answers: Answers = lambda uid, address: (),
    *,
    proxies_enforced: bool = True,
    https_hooks: bool = True,
) -> RelayPlan:
    """The plan of these pods, which are all of the node."""
    plans = RelayPlans(answers, https_hooks=https_hooks)
    plans.update({state.pod.uid: state for state in pods}, proxies_enforced=proxies_enforced)
    return plans.current

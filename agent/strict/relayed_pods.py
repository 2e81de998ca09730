"""What conditions of pods show of the relay: why it does not serve a pod, why it serves one in
enforce, and which ports a pod shares."""

import dataclasses
from collections.abc import Callable, Iterable

from agent.pods.changes import Changes
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict import targets as relay_targets
from agent.strict.active_relay import ActiveRelay
from agent.strict.targets import RelayPlan
from bpf.verdicts import Mode


@dataclasses.dataclass(frozen=True, slots=True)
class RelayAnswers:
    """What the condition of a pod shows of the relay.

    problem: one sentence about why kubelet connections bypass the relay, or None; need: why a pod
    in enforce needs the relay, as a clause; note: one sentence about ports that the pod shares with
    others. Both are empty for most pods.
    """

    problem: str | None
    need: str
    note: str


class RelayedPods:
    """Has the plan of targets, and answers from it."""

    def __init__(self, store: PodStore, serving: Callable[[], ActiveRelay | str]) -> None:
        """serving: the relay that serves, or one sentence about why none does."""
        self._store = store
        self._serving = serving
        self.plan = RelayPlan((), {})
        """The newest one; to be replaced, then `publish` what changed."""
        self.changes = Changes()
        """Pods whose answers may have changed. Subscribers compare, by their own memory."""

    def answers_for(self, state: PodState) -> RelayAnswers:
        note = self.plan.notes.get(state.pod.uid, "")
        return RelayAnswers(self.problem_for(state), self.need_for(state), note)

    def need_for(self, state: PodState) -> str:
        """Why a pod in enforce needs the relay, as a clause; empty if it does not."""
        return self.plan.needs.get(state.pod.uid, "") if state.pod.mode is Mode.ENFORCE else ""

    def problem_for(self, state: PodState) -> str | None:
        """One sentence about why kubelet connections bypass the relay for this pod, or None."""
        uid = state.pod.uid
        if state.pod.mode is Mode.ENFORCE and not self.need_for(state):
            return relay_targets.NOT_STRICT
        if (excluded := relay_targets.excluded_reason(state)) is not None:
            return excluded
        planned = self.plan.by_key
        desired = relay_targets.desired_targets(state, state.own_addresses)
        if state.pod.mode is Mode.ENFORCE:
            desired = tuple(target for target in desired if target.key in planned)
        elif not desired:
            return None  # the pod has no probe or hook
        if conflict := self.plan.conflicts.get(uid):
            return conflict
        serving = self._serving()
        if isinstance(serving, str):
            return serving
        for target in desired:
            claimant = self.plan.claimants.get(target.key, target.key)
            if rejection := serving.rejected.get(claimant):
                return sentence(f"the relay rejects {target.address}: {rejection}")
            if not serving.proxies(target, planned.get(target.key)):
                return "the relay is not updated yet."
        return None

    def publish(self, uids: Iterable[str]) -> None:
        """The plan for these pods, some of which may be gone, may have changed, or how the relay
        serves them."""
        for uid in uids:
            if uid in self._store.pods:
                self.changes.mark(uid)

    def publish_all(self) -> None:
        """Another relay serves, or none does any more."""
        self.publish(self._store.pods)


def sentence(text: str) -> str:
    """The clause as a sentence."""
    return f"{text.rstrip('.')}."

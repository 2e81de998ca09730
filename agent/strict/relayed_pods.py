"""What conditions of pods show of the relay: why it does not serve a pod, why it serves one in
enforce, and which ports a pod shares."""

from collections.abc import Callable

from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict import targets as relay_targets
from agent.strict.active_relay import ActiveRelay
from agent.strict.targets import RelayPlan
from bpf.verdicts import Mode


class RelayedPods:
    """Has the plan of targets, and marks each pod of which its answers changed."""

    def __init__(self, store: PodStore, serving: Callable[[], ActiveRelay | str]) -> None:
        """serving: the relay that serves, or one sentence about why none does."""
        self._store = store
        self._serving = serving
        self.plan = RelayPlan((), {})
        """The newest one; to be replaced, then `publish`."""
        self._reported: dict[str, tuple[str | None, str, str]] = {}
        """Last results of `problem_for`, `need_for` and `note_for`, by pod's uid."""

    def problem_for(self, state: PodState) -> str | None:
        """One sentence about why kubelet connections bypass the relay for this pod, or None."""
        problem, _, _ = self._reported[state.pod.uid] = self._report_on(state)
        return problem

    def note_for(self, state: PodState) -> str:
        """One sentence about ports that the pod shares with others; empty if it shares none."""
        return self.plan.notes.get(state.pod.uid, "")

    def _report_on(self, state: PodState) -> tuple[str | None, str, str]:
        return self.bypassed_because(state), self.need_for(state), self.note_for(state)

    def need_for(self, state: PodState) -> str:
        """Why a pod in enforce needs the relay, as a clause; empty if it does not."""
        return self.plan.needs.get(state.pod.uid, "") if state.pod.mode is Mode.ENFORCE else ""

    def bypassed_because(self, state: PodState) -> str | None:
        """As `problem_for`, for a reader that follows no changes."""
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

    def publish(self) -> None:
        """Mark the pods whose problem with the relay changed."""
        states = {state.pod.uid: state for state in self._store.states()}
        for uid, reported in list(self._reported.items()):
            if (state := states.get(uid)) is None:
                del self._reported[uid]
            elif self._report_on(state) != reported:
                self._store.in_force.mark(uid)


def sentence(text: str) -> str:
    """The clause as a sentence."""
    return f"{text.rstrip('.')}."

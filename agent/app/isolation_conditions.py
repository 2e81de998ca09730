"""Publishes the condition `podgate.io/isolation-ready` of every pod."""

import asyncio

from agent import labels
from agent.app.open_ports import OpenPorts
from agent.pods import isolation
from agent.pods.changes import Subscription
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict.relayed_pods import RelayAnswers
from agent.strict.supervisor import RelaySupervisor


class IsolationConditions:
    """Follows store and relay: each pod whose state changed, or of which the relay answers
    differently, gets the condition that follows from it. To be created on the loop."""

    def __init__(self, store: PodStore, relays: RelaySupervisor, open_ports: OpenPorts) -> None:
        self._store = store
        self._relays = relays
        self._open_ports = open_ports
        self._wake = asyncio.Event()
        self._changes = store.in_force.subscribe(Subscription(self._wake))
        self._relay_changes = relays.pods.changes.subscribe(Subscription(self._wake))
        self._shown: dict[str, RelayAnswers] = {}
        """What the relay answered when a pod's condition was last published, by uid."""

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self.publish()

    def publish(self) -> None:
        """Publish what changed so far, for a reader that needs conditions and states to agree."""
        is_path_blocked = isolation.is_path_blocked(self._store.states())
        changed = dict.fromkeys(self._changes.take())
        for uid in changed | dict.fromkeys(self._relay_changes.take()):
            if (state := self._store.get(uid)) is None:
                self._shown.pop(uid, None)
                continue
            relayed = self._relays.pods.answers_for(state)
            if uid in changed or relayed != self._shown.get(uid):
                self._shown[uid] = relayed
                self._publish(state, relayed, is_path_blocked=is_path_blocked)

    def _publish(self, state: PodState, relayed: RelayAnswers, *, is_path_blocked: bool) -> None:
        status = isolation.isolation_status(
            state,
            relayed.problem,
            has_fallback=self._relays.has_fallback,
            kubelet_problem=self._open_ports.problem_for(state),
            relay_need=relayed.need,
            relay_note=relayed.note,
            is_path_blocked=is_path_blocked,
        )
        if status is None:
            return
        if isolation.is_path_trusted(state, status):
            state.trusted_netns = state.gated_netns
        self._store.conditions.set(
            state.pod, labels.ISOLATION_READY, status.status, status.reason, status.message
        )

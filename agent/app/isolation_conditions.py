"""Publishes the condition `podgate.io/isolation-ready` of every pod."""

from agent import labels
from agent.app.open_ports import OpenPorts
from agent.pods import isolation
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict.supervisor import RelaySupervisor


class IsolationConditions:
    """Follows the store: each pod whose state changed gets the condition that follows from it."""

    def __init__(self, store: PodStore, relays: RelaySupervisor, open_ports: OpenPorts) -> None:
        self._store = store
        self._relays = relays
        self._open_ports = open_ports
        self._changes = store.in_force.subscribe()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changes.wait()
            self.publish()

    def publish(self) -> None:
        """Publish what changed so far, for a reader that needs conditions and states to agree."""
        is_path_blocked = isolation.is_path_blocked(self._store.states())
        for uid in self._changes.take():
            if state := self._store.get(uid):
                self._publish(state, is_path_blocked=is_path_blocked)

    def _publish(self, state: PodState, *, is_path_blocked: bool) -> None:
        status = isolation.isolation_status(
            state,
            self._relays.pods.problem_for(state),
            has_fallback=self._relays.has_fallback,
            kubelet_problem=self._open_ports.problem_for(state),
            relay_need=self._relays.pods.need_for(state),
            relay_note=self._relays.pods.note_for(state),
            is_path_blocked=is_path_blocked,
        )
        if status is None:
            return
        if isolation.is_path_trusted(state, status):
            state.trusted_netns = state.gated_netns
        self._store.conditions.set(
            state.pod, labels.ISOLATION_READY, status.status, status.reason, status.message
        )

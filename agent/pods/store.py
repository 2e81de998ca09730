"""The state of all pods of this node: sources write what is desired, components reconcile from it.

Nothing here calls a component. A change marks the pod for all subscribers of that kind of change,
and each reads from the store what it needs.
"""

import asyncio
from collections.abc import Callable, Collection

import structlog

from agent.logs import Event
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import Conditions
from agent.pods.pacing import PacedMarks
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from bpf.abi import IPAddress
from bpf.verdicts import Mode
from probes.netns import Netns

log = structlog.get_logger(__name__)

RELAY = Pod(uid="relay", namespace="", name="relay", mode=Mode.ENFORCE)
"""Takes a pod's place where an interface is a relay's."""


class PodStore:
    """Pods by uid, with what is in force for them."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.pods: dict[str, PodState] = {}
        self.removed: dict[str, PodState] = {}
        """Pods that are gone and may still have gates; the reconciler deletes them from here."""
        self.relay_gates: dict[int, str] = {}
        """The relays' interfaces that are gated: names by ifindex."""
        self.desired = Changes()
        """A source added, changed or removed the pod."""
        self.in_force = Changes()
        """What is in force for the pod may have changed: gates, addresses, status, path test."""
        self.awaited: set[str] = set()
        """Pods, by uid, for whose gates the container runtime waits: theirs come first."""
        self.to_reconcile = self.desired.subscribe()
        """Pods whose gates are to be brought into the desired state: the reconciler's queue."""
        self.changed_rules = Subscription(self.to_reconcile.changed)
        """Pods of which nothing but rules changed: all at once, without a pass over each."""
        self.network_changes = PacedMarks(self.to_reconcile)
        """Changes inside pods' network namespaces, which a pod can make at any rate."""
        self.synced = asyncio.Event()
        """Set once every pod of the node has been reconciled."""
        self.is_reconciling = False
        """Whether a pass over the queue is under way."""

    @property
    def is_synced(self) -> bool:
        return self.synced.is_set()

    @property
    def is_settled(self) -> bool:
        """Whether every pod has been reconciled since it was last marked."""
        is_idle = self.to_reconcile.is_empty and self.changed_rules.is_empty
        return self.is_synced and is_idle and not self.is_reconciling

    def states(self) -> Collection[PodState]:
        return self.pods.values()

    def desired_pods(self) -> list[Pod]:
        return [state.pod for state in self.pods.values()]

    def get(self, uid: str) -> PodState | None:
        return self.pods.get(uid)

    def pod(self, uid: str) -> Pod | None:
        """What is desired of a pod."""
        state = self.pods.get(uid)
        return state.pod if state else None

    def own_addresses(self, uid: str) -> tuple[str, ...]:
        """A pod's confirmed addresses."""
        state = self.pods.get(uid)
        return state.own_addresses if state else ()

    def set_pod(self, pod: Pod) -> None:
        """Add or change a pod. One that was removed and still has its gates continues with them."""
        state = self.pods.get(pod.uid) or self.removed.pop(pod.uid, None) or PodState(pod)
        if state.pod.netns_path != pod.netns_path:
            # The conditions are of a sandbox that no longer is the pod's.
            state.status = None
            self.conditions.forget(pod.uid)
        state.pod = pod
        self.pods[pod.uid] = state
        self.desired.mark(pod.uid)

    def remove_pod(self, uid: str) -> None:
        """Remove a pod: its gates are detached, its probes stop, its conditions are forgotten."""
        state = self.pods.pop(uid, None)
        if state is None:
            return
        self.removed[uid] = state
        self.conditions.forget(uid)
        self.network_changes.forget(uid)
        self.desired.mark(uid)
        log.info(Event.POD_REMOVED, pod=state.pod.full_name, uid=uid)

    def mark(self, uid: str) -> None:
        """Have one pod reconciled."""
        self.to_reconcile.mark(uid)

    def mark_all(self) -> None:
        """Have every pod reconciled."""
        for uid in self.pods:
            self.to_reconcile.mark(uid)

    def mark_pending(self) -> None:
        """Have those pods reconciled that wait for something: an interface came or went.

        New addresses are checked again as well, at the pod's own pace, and failed gates.
        """
        self._mark_if(lambda state: state.is_pending or state.awaits_plugin)
        for uid, state in self.pods.items():
            if state.is_unsettled:
                self.network_changes.mark(uid)

    def mark_namespace(self, nsid: int) -> None:
        """Have the pod reconciled that is in the namespace with this number, at its own pace."""
        owners, unread = [], []
        for uid, state in self.pods.items():
            number = state.network and state.network.nsid
            if number == nsid:
                owners.append(uid)
            # One without a sandbox has no namespace yet, and is marked once it has.
            elif number is None and state.pod.netns_path is not None:
                unread.append(uid)
        for uid in owners or unread:
            self.network_changes.mark(uid)

    def mark_interfaces(self, ifindexes: set[int]) -> None:
        """Have the pods reconciled whose gates are on these interfaces."""
        self._mark_if(lambda state: not state.gates.keys().isdisjoint(ifindexes))

    def gated_interfaces(self) -> set[int]:
        """All interfaces with a gate, of pods and relays."""
        return self.relay_gates.keys() | {
            ifindex for state in self.pods.values() for ifindex in state.gates
        }

    def enforced_interfaces(self) -> set[int]:
        """Interfaces with a gate that drops, of pods and relays."""
        return self.relay_gates.keys() | {
            ifindex
            for state in self.pods.values()
            if state.pod.mode >= Mode.ENFORCE
            for ifindex in state.gates
        }

    def ungated_interfaces(self) -> set[int]:
        """Interfaces of pods in mode off."""
        return {
            ifindex
            for state in self.pods.values()
            if state.pod.mode is Mode.OFF
            for ifindex in state.ungated_interfaces or ()
        }

    def confirmed_addresses(self) -> set[IPAddress]:
        """All pods' own addresses."""
        return {address for state in self.pods.values() for address in state.claims.confirmed}

    def pod_of_interface(self, ifindex: int) -> Pod | None:
        """The pod whose gate is on an interface; `RELAY` for a relay's."""
        for state in self.pods.values():
            if ifindex in state.gates:
                return state.pod
        return RELAY if ifindex in self.relay_gates else None

    def netns_owner(self, netns: Netns, pod: Pod) -> Pod | None:
        """Another pod that already uses this network namespace, if there is one.

        Calls stat(): once a namespace is removed, the kernel gives its number to the next one.
        """
        for uid, state in self.pods.items():
            other = state.netns
            if (
                uid != pod.uid
                and other is not None
                and (other.device, other.inode) == (netns.device, netns.inode)
                and other.exists()
            ):
                return state.pod
        return None

    def _mark_if(self, predicate: Callable[[PodState], bool]) -> None:
        for uid, state in self.pods.items():
            if predicate(state):
                self.to_reconcile.mark(uid)

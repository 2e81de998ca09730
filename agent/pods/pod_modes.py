"""The modes of this node's pods: labels as they were last read, and what follows from them.

A label that becomes unreadable keeps its last readable value, also over a restart of the agent:
a typing error must neither open a gate nor close one. One that never was readable has no effect.
"""

import pathlib

import msgspec
import structlog

from agent import labels as agent_labels
from agent import state_files
from agent.logs import Event
from agent.pods import modes
from agent.pods.changes import Changes
from agent.pods.modes import (
    Closures,
    Labels,
    ModeDecision,
    ModeLabel,
    NamespaceModes,
    NodeModes,
)
from agent.pods.pod import Problem
from agent.state_files import StateSaver
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

NODE = ""
"""Takes a namespace's place in `PodModes.changes` where the node's part changed."""

HELD = "kube-system"
"""The namespace that stays at audit until podgate's default rules are in force: without them the
cluster itself would break."""

# A roll-out labels many pods; the file is for restarts, not for the last second.
_SETTLE_SECONDS = 2.0


class _Saved(msgspec.Struct):
    """The file's content: the last readable value of each label, by its key."""

    labels: dict[str, Mode] = {}


class NewPodModes(msgspec.Struct, frozen=True):
    """Modes of pods whose labels are unknown: by namespace, and `default` for all others."""

    default: Mode
    namespaces: dict[str, Mode] = {}


class PodModes:
    """Reads the labels, and decides each pod's mode (agent/pods/modes.py)."""

    def __init__(
        self,
        default: Mode,
        ceiling: Mode = Mode.STRICT,
        *,
        own_namespace: str | None = None,
        state: pathlib.Path | None = None,
        is_complete: bool = True,
        pods_decide: bool = False,
    ) -> None:
        """default, ceiling: the agent's settings; own_namespace: podgate's, whose label is the
        ceiling of the cluster; state: the file to save to; is_complete: whether there are no labels
        of a node and of namespaces to wait for, as without a cluster; pods_decide: whether a pod's
        label may be less strict, since the node's operator wrote it."""
        self.changes = Changes()
        """Namespaces of which a mode changed; `NODE` for all pods."""
        self.node = NodeModes(default=default, ceiling=ceiling)
        self.is_complete = is_complete
        """Whether the labels of node and namespaces have been read."""
        self.closures: Closures | None = None
        """What closes pods beside labels; None: nothing does."""
        self._holds = not is_complete
        """Whether the default rules are not in force yet."""
        self._settings = default, ceiling
        self._own_namespace = own_namespace
        self._node_labels = modes.NO_LABEL, modes.NO_LABEL
        """Mode and ceiling of the node."""
        self._cluster = modes.NO_LABEL
        self._is_off = False
        self._unlabelled = NamespaceModes(may_override=pods_decide)
        self._namespaces: dict[str, NamespaceModes] = {}
        """Those that have a label."""
        self._last: dict[str, Mode] = {}
        self._restored: dict[str, Mode] = {}
        """Of the previous agent; what is not read in this one's life is not saved again."""
        self._state = state
        self._saver = state and StateSaver(
            state,
            lambda: _Saved(dict(self._last)),
            failure=Event.MODES_NOT_SAVED,
            settle_seconds=_SETTLE_SECONDS,
        )

    def restore(self) -> None:
        """Read what the previous agent saved. Reads a file; call it once, before all else."""
        if self._state is not None:
            found = state_files.read(self._state, _Saved, failure=Event.SAVED_MODES_UNREADABLE)
            self._restored = found.labels if found else {}

    async def run(self) -> None:
        """Save until cancelled."""
        if self._saver:
            await self._saver.run()

    def set_node(self, labels: Labels) -> bool:
        """The node's labels; returns whether its part changed."""
        self._node_labels = (
            self._read_mode("node", "", labels),
            self._read("node", "", labels, agent_labels.MAX_MODE_LABEL),
        )
        return self._decide_node()

    def set_off(self, *, is_off: bool) -> bool:
        """Whether `podgate off --node` is in force; returns whether the node's part changed."""
        self._is_off = is_off
        return self._decide_node()

    def set_namespace(self, name: str, labels: Labels) -> bool:
        """A namespace's labels, none for a deleted one; returns whether its part changed."""
        if name == self._own_namespace:
            self._cluster = self._read("namespace", name, labels, agent_labels.MAX_MODE_LABEL)
            self._decide_node()
        found = NamespaceModes(
            self._read_mode("namespace", name, labels),
            labels.get(agent_labels.OVERRIDE_LABEL) == agent_labels.OVERRIDE_ALLOWED,
            name if modes.is_left(labels) else "",
        )
        if found == self._of_namespace(name):
            if self.closures is None:
                return False
            # Any label may decide then.
        elif found == NamespaceModes():
            del self._namespaces[name]
        else:
            self._namespaces[name] = found
        self.changes.mark(name)
        return True

    def complete(self) -> None:
        """The labels of node and namespaces have been read."""
        if not self.is_complete:
            self.is_complete = True
            self.changes.mark(NODE)

    def apply_rules(self) -> None:
        """podgate's default rules are in force."""
        if self._holds:
            self._holds = False
            self.changes.mark(HELD)

    def of_pod(
        self, uid: str, namespace: str, labels: Labels, *, host_network: bool = False
    ) -> ModeDecision:
        """The mode of a pod with these labels."""
        label = self._read("pod", uid, labels, agent_labels.MODE_LABEL)
        return self._decide(namespace, label, labels, host_network=host_network)

    def of_sandbox(self, uid: str, namespace: str, *, host_network: bool = False) -> ModeDecision:
        """The mode of a pod whose labels are unknown: by the last value of its own, if any."""
        key = _key("pod", uid, agent_labels.MODE_LABEL)
        last = ModeLabel(self._last_of(key))
        return self._decide(namespace, last, None, host_network=host_network)

    def _decide(
        self,
        namespace: str,
        label: ModeLabel,
        labels: Labels | None,
        *,
        host_network: bool = False,
    ) -> ModeDecision:
        closed_by = ""
        if self.closures is not None and not host_network:
            closed_by = self.closures.closed_by(namespace, labels)
        node = self._node_of(namespace)
        return modes.decide(node, self._of_namespace(namespace), label, closed_by)

    def kept_up_to(self, namespace: str) -> Mode:
        """As `Pod.kept_up_to`."""
        is_held = self._holds and namespace == HELD
        is_read = self.is_complete and (self.closures is None or self.closures.is_settled)
        return self.node.ceiling if is_held or not is_read else Mode.OFF

    def forget(self, uid: str) -> None:
        """A pod is gone."""
        self._forget(_key("pod", uid, agent_labels.MODE_LABEL))

    @property
    def of_new_pods(self) -> NewPodModes:
        """The modes for podgate-cni."""
        default = self.default
        names = {*self._namespaces, HELD}
        if self.closures is not None:
            names.update(self.closures.namespaces())
        own = {name: self._decide(name, ModeLabel(), None).mode for name in sorted(names)}
        return NewPodModes(default, {name: mode for name, mode in own.items() if mode != default})

    @property
    def label_problems(self) -> list[Problem]:
        """Labels of the node and of all namespaces that are no mode."""
        found = [one.label.problem for _, one in sorted(self._namespaces.items())]
        return [*self.node.problems, *(problem for problem in found if problem)]

    @property
    def default(self) -> Mode:
        """The mode of pods without a label, in a namespace without one."""
        closed_by = self.closures.closed_by("", None) if self.closures is not None else ""
        return modes.decide(self.node, NamespaceModes(), ModeLabel(), closed_by).mode

    def _node_of(self, namespace: str) -> NodeModes:
        """The node's part for pods of a namespace."""
        if self._holds and namespace == HELD and self.node.ceiling > Mode.AUDIT:
            origin = "podgate until its default rules are in force"
            return msgspec.structs.replace(self.node, ceiling=Mode.AUDIT, ceiling_from=origin)
        return self.node

    def _decide_node(self) -> bool:
        found = modes.node_modes(
            *self._settings, *self._node_labels, cluster=self._cluster, is_off=self._is_off
        )
        if found == self.node:
            return False
        for problem in found.problems:
            if problem not in self.node.problems:
                log.warning(Event.NODE_LABEL_INVALID, problem=problem.message)
        log.info(
            Event.NODE_MODES_CHANGED,
            default=found.default.label,
            ceiling=found.ceiling.label,
            ceiling_from=found.ceiling_from,
        )
        self.node = found
        self.changes.mark(NODE)
        return True

    def _of_namespace(self, name: str) -> NamespaceModes:
        return self._namespaces.get(name, self._unlabelled)

    def _read(self, owner: str, identity: str, labels: Labels, name: str) -> ModeLabel:
        key = _key(owner, identity, name)
        found = modes.read_label(labels, name, _named(owner, identity), self._last_of(key))
        return self._remember(key, found)

    def _read_mode(self, owner: str, identity: str, labels: Labels) -> ModeLabel:
        """The mode label of a node or namespace."""
        key = _key(owner, identity, agent_labels.MODE_LABEL)
        found = modes.read_mode(labels, _named(owner, identity), self._last_of(key))
        return self._remember(key, found)

    def _remember(self, key: str, found: ModeLabel) -> ModeLabel:
        if found.mode is None:
            self._forget(key)
        elif self._last.get(key) != found.mode:
            self._last[key] = found.mode
            self._mark()
        return found

    def _last_of(self, key: str) -> Mode | None:
        return self._last.get(key, self._restored.get(key))

    def _forget(self, key: str) -> None:
        self._restored.pop(key, None)
        if self._last.pop(key, None) is not None:
            self._mark()

    def _mark(self) -> None:
        if self._saver:
            self._saver.mark()


def _named(owner: str, identity: str) -> str:
    return f"namespace {identity}" if owner == "namespace" else f"the {owner}"


def _key(owner: str, identity: str, name: str) -> str:
    return f"{owner} {identity} {name}"

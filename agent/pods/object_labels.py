"""Labels of the node and of namespaces, which selectors need beside those of pods."""

import dataclasses
import platform
from collections.abc import Collection, Mapping

from agent.pods.changes import Changes
from agent.pods.modes import Labels

NODE = ""
"""Takes a namespace's place in `ObjectLabels.changes` where the node's labels changed."""

_NAME = "kubernetes.io/metadata.name"
_HOSTNAME = "kubernetes.io/hostname"


@dataclasses.dataclass(frozen=True, slots=True)
class LabelSnapshot:
    """The labels of one moment."""

    node: Labels = dataclasses.field(default_factory=dict)
    namespaces: Mapping[str, Labels] = dataclasses.field(default_factory=dict)

    def of_namespace(self, name: str) -> Labels:
        """Its labels. It has at least the one with its name, which the API server always sets
        (KEP-2161)."""
        return self.namespaces.get(name) or {_NAME: name}


class ObjectLabels:
    """The current labels. Without a cluster the node has only that with its host name."""

    def __init__(self) -> None:
        self.changes = Changes()
        """Namespaces whose labels changed; `NODE` for the node."""
        self._node: Labels = {_HOSTNAME: platform.node()}
        self._namespaces: dict[str, Labels] = {}

    def set_node(self, labels: Labels) -> None:
        if labels != self._node:
            self._node = labels
            self.changes.mark(NODE)

    def set_namespace(self, name: str, labels: Labels) -> None:
        """A namespace's labels, none for a deleted one."""
        if labels != self._namespaces.get(name, {}):
            if labels:
                self._namespaces[name] = labels
            else:
                del self._namespaces[name]
            self.changes.mark(name)

    def of_namespace(self, name: str) -> Labels:
        """As `LabelSnapshot.of_namespace`."""
        return self._namespaces.get(name) or {_NAME: name}

    @property
    def namespaces(self) -> Collection[str]:
        """The names of those with labels."""
        return self._namespaces.keys()

    def snapshot(self) -> LabelSnapshot:
        return LabelSnapshot(self._node, dict(self._namespaces))

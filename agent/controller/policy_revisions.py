"""What the revisions mean that nodes report: which policies a node with that revision has.

The API server orders all changes, so each set of policies that a node ever has is one of the sets
that the controller sees. A node has a policy if its set is not older than the policy's last change.
"""

from collections.abc import Iterable
from typing import Final

from agent.kube import node_report
from agent.kube.objects import ObjectMetadata

_MAX_REVISIONS: Final = 1024
"""Nodes write once a minute; a node that is more changes behind has none of the newest."""


class PolicyRevisions:
    """The newest sets of policies, by revision."""

    def __init__(self) -> None:
        self.current = ""
        """The revision of the newest set."""
        self.names: list[str] = []
        """Of the newest set, in the order in which nodes report them."""
        self._number = 0
        self._numbers: dict[str, int] = {}
        self._versions: dict[str, tuple[str, int]] = {}
        self._changed: dict[str, int] = {}

    def update(self, policies: Iterable[ObjectMetadata]) -> None:
        """Read the newest set. Call it at each change."""
        found = {one.name: one for one in policies}
        versions = {name: (one.uid, one.generation) for name, one in found.items()}
        if self._numbers and versions == self._versions:
            return
        self._number += 1
        for name in versions.keys() | self._versions.keys():
            if versions.get(name) != self._versions.get(name):
                self._changed[name] = self._number
        self._versions = versions
        self.names = sorted(versions)
        self._changed = {name: self._changed[name] for name in versions}
        self.current = node_report.revision(found.values())
        # A set that comes back, as when a policy is deleted again, is as new as it can be.
        self._numbers.pop(self.current, None)
        self._numbers[self.current] = self._number
        while len(self._numbers) > _MAX_REVISIONS:
            del self._numbers[next(iter(self._numbers))]

    def has(self, revision: str, name: str) -> bool:
        """Whether a node with this revision has the newest generation of a policy."""
        changed = self._changed.get(name)
        return changed is not None and self._numbers.get(revision, 0) >= changed

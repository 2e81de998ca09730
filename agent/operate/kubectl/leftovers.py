"""What an uninstallation leaves: labels that users set, and HostAccessPolicies in a file.

Nothing reads the labels until podgate is installed again. Then they are in force at once, before
anyone has applied the policies.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

from agent.labels import DOMAIN, MODE_LABEL
from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

POLICIES = "hostaccesspolicies.policy.podgate.io"
_CLOSED = ("enforce", "strict")
# Of an object that is to be created again; the API server sets them.
_OF_SERVER = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "ownerReferences",
    "selfLink",
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


@dataclasses.dataclass(frozen=True, slots=True)
class Labelled:
    """An object with labels of podgate. kind: "namespace" or "node"; labels: as KEY=VALUE."""

    kind: str
    name: str
    labels: tuple[str, ...]

    @property
    def enforces(self) -> bool:
        """Whether it closes pods as soon as podgate is installed."""
        return any(label == f"{MODE_LABEL}={mode}" for label in self.labels for mode in _CLOSED)

    @property
    def sentence(self) -> str:
        return f"{self.kind} {self.name}: {', '.join(self.labels)}"

    @property
    def removal(self) -> list[str]:
        """Arguments of kubectl that remove the labels."""
        keys = [label.partition("=")[0] for label in self.labels]
        return ["label", self.kind, self.name, *(f"{key}-" for key in keys)]


def labelled(cluster: Cluster) -> list[Labelled]:
    """All namespaces and nodes with labels of podgate, but for podgate's own namespace."""
    found = []
    for kind in ("namespace", "node"):
        for one in cluster.items(f"{kind}s"):
            labels = one["metadata"].get("labels") or {}
            own = tuple(f"{k}={labels[k]}" for k in sorted(labels) if k.startswith(f"{DOMAIN}/"))
            if own and (kind, one["metadata"]["name"]) != ("namespace", cluster.namespace):
                found.append(Labelled(kind, one["metadata"]["name"], own))
    return found


def remove_labels(cluster: Cluster, found: Iterable[Labelled]) -> None:
    for one in found:
        cluster.run(*one.removal)


def save_policies(cluster: Cluster, file: pathlib.Path) -> str:
    """Write them to a file that `kubectl apply` creates them from; the command, or an empty string
    if there are none. Raises `KubectlError` if they cannot be saved: then they are not deleted."""
    found = cluster.items_if_served(POLICIES)
    if not found:
        return ""
    content = {"apiVersion": "v1", "kind": "List", "items": [_to_create(one) for one in found]}
    try:
        with file.open("x", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2)
    except OSError as error:
        raise KubectlError(
            f"{file} cannot be written ({error.strerror}); name another with --policies-file"
        ) from error
    printing.line(f"{len(found)} HostAccessPolicies saved to {file}.")
    return f"kubectl apply -f {file}"


def _to_create(policy: Object) -> Object:
    metadata = {key: value for key, value in policy["metadata"].items() if key not in _OF_SERVER}
    if annotations := metadata.get("annotations"):
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    return {**{k: v for k, v in policy.items() if k != "status"}, "metadata": metadata}


def show(found: Sequence[Labelled], apply_policies: str) -> None:
    """What stays, with the commands that remove it or apply it again."""
    if found:
        printing.line("These labels stay; the next installation is in force by them at once:")
        for one in found:
            printing.line(f"  {one.sentence}")
            printing.line(f"    to remove: kubectl {' '.join(one.removal)}")
    if apply_policies:
        printing.line(f"After the next installation: {apply_policies}")

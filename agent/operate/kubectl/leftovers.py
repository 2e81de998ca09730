"""What an uninstallation leaves: labels that users set, and HostAccessPolicies in a file.

Nothing reads the labels until podgate is installed again. Then those that enforce wait until their
owner confirms them, since the policies may not be applied yet: a label beside them marks them
(agent/pods/modes.py). An upgrade, or a removal by Helm alone, which leaves gates, does not set it.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

from agent.labels import DOMAIN, LEFT_LABEL, MODE_LABEL
from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object, is_missing

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
    """An object with labels of podgate. kind: "namespace" or "node"; labels: their values; pods:
    how many of the namespace have a label of their own that enforces."""

    kind: str
    name: str
    labels: dict[str, str]
    pods: int = 0

    @property
    def enforces(self) -> bool:
        """Whether it would close pods as soon as podgate is installed."""
        return self.pods > 0 or self.labels.get(MODE_LABEL) in _CLOSED

    @property
    def sentence(self) -> str:
        parts = [f"{key}={value}" for key, value in sorted(self.labels.items())]
        if self.pods:
            parts.append(f"{self.pods} pods with labels that enforce")
        return f"{self.kind} {self.name}: {', '.join(parts)}"

    @property
    def removal(self) -> list[str]:
        """Arguments of kubectl that remove the labels."""
        return ["label", self.kind, self.name, *(f"{key}-" for key in sorted(self.labels))]

    @property
    def confirmation(self) -> list[str]:
        """Arguments of kubectl by which the next installation is in force by them."""
        return ["label", self.kind, self.name, f"{LEFT_LABEL}-"]


def labelled(cluster: Cluster) -> list[Labelled]:
    """All namespaces and nodes with labels of podgate, but for podgate's own namespace, and
    namespaces of pods with such labels that enforce."""
    selector = f"{MODE_LABEL} in ({','.join(_CLOSED)})"
    pods = collections.Counter(
        one["metadata"]["namespace"]
        for one in cluster.items("pods", "--all-namespaces", "-l", selector)
    )
    found = []
    for kind in ("namespace", "node"):
        for one in cluster.items(f"{kind}s"):
            labels = one["metadata"].get("labels") or {}
            own = {key: labels[key] for key in labels if key.startswith(f"{DOMAIN}/")}
            name = one["metadata"]["name"]
            count = pods[name] if kind == "namespace" else 0
            if (own or count) and (kind, name) != ("namespace", cluster.namespace):
                found.append(Labelled(kind, name, own, count))
    return found


def remove_labels(cluster: Cluster, found: Iterable[Labelled]) -> list[Labelled]:
    """What is left: pods' own labels, which their workloads would set again."""
    left = []
    for one in found:
        is_there = not one.labels or _is_changed(cluster, one.removal)
        if is_there and one.pods:
            left.append(dataclasses.replace(one, labels={}))
    return mark(cluster, left)


def mark(cluster: Cluster, found: Iterable[Labelled]) -> list[Labelled]:
    """Have the next installation wait for a confirmation of labels that enforce. Returns those that
    still exist, as far as this shows it."""

    def is_marked(one: Labelled) -> bool:
        label = f"{LEFT_LABEL}={one.labels.get(MODE_LABEL, '')}"
        return _is_changed(cluster, ["label", one.kind, one.name, label, "--overwrite"])

    return [one for one in found if not one.enforces or is_marked(one)]


def _is_changed(cluster: Cluster, command: Sequence[str]) -> bool:
    """False: the object was deleted after it was listed."""
    try:
        cluster.run(*command)
    except KubectlError as error:
        if not is_missing(error):
            raise
        return False
    return True


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
        printing.line("These labels stay. After the next installation, those that enforce have no")
        printing.line("effect until you confirm them:")
        for one in found:
            printing.line(f"  {one.sentence}")
            if one.labels:
                printing.line(f"    to remove: kubectl {' '.join(one.removal)}")
            if one.enforces:
                printing.line(f"    to confirm: kubectl {' '.join(one.confirmation)}")
    if apply_policies:
        printing.line(f"After the next installation: {apply_policies}")

"""The nodes that podgate knows: those that its DaemonSet selects, and those that ever had an agent.

Gates are pinned, so a node that the DaemonSet selects no longer stays as it was. Its NodeReport
shows that there was an agent: it is deleted with its Node only.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

MISSING = "there is no Node of this name"


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node. is_selected: by the DaemonSet now; problem: why nothing there can be reached, by its
    Node object, without the full stop; or empty."""

    name: str
    is_selected: bool = True
    problem: str = ""


def collect(
    daemonset: dict[str, Any], nodes: Iterable[dict[str, Any]], reported: Iterable[str]
) -> list[ClusterNode]:
    """In order of names. reported: names of nodes that had an agent, or have one."""
    spec = daemonset["spec"]["template"]["spec"]
    existing = {node["metadata"]["name"]: node for node in nodes}
    chosen = {name for name, node in existing.items() if is_selected(node, spec)}
    return [
        ClusterNode(name, name in chosen, _problem(existing.get(name)))
        for name in sorted(chosen.union(reported))
    ]


def is_selected(node: dict[str, Any], spec: dict[str, Any]) -> bool:
    """Whether a pod of this spec may run on the node, by its node selector and required node
    affinity."""
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(_matches(labels, one) for one in term.get("matchExpressions") or ())
        and all(_matches(fields, one) for one in term.get("matchFields") or ())
        for term in required.get("nodeSelectorTerms") or ()
    )


def _matches(labels: dict[str, str], requirement: dict[str, Any]) -> bool:
    """As k8s.io/component-helpers/scheduling/corev1/nodeaffinity; of an operator that is not known
    here every node."""
    value, values = labels.get(requirement["key"]), requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" if value is None or not value.lstrip("-").isdecimal():
            return False
        case "Gt":
            return int(str(value)) > int(values[0])
        case "Lt":
            return int(str(value)) < int(values[0])
    return True


def _problem(node: dict[str, Any] | None) -> str:
    if node is None:
        return f"{MISSING} any more"
    for one in node.get("status", {}).get("conditions") or ():
        if one["type"] == "Ready" and one["status"] != "True":
            since = one.get("lastTransitionTime")
            message = str(one.get("message") or one.get("reason") or "").rstrip(".")
            reason = f" ({message})" if message else ""
            return f"its Node is NotReady{f' since {since}' if since else ''}{reason}"
    return ""

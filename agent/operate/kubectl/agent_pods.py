"""The agents' pods, by their objects."""

import dataclasses
from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]

CONTAINER = "agent"


@dataclasses.dataclass(frozen=True, slots=True)
class AgentPod:
    """A running agent's pod, by its name. problem: why its container does not run, or empty."""

    name: str
    node: str
    is_ready: bool = True
    problem: str = ""


def youngest(pods: Iterable[Object], daemonset: str) -> list[AgentPod]:
    """Those of the DaemonSet whose pod runs, at most one for each node: the youngest whose
    container runs. In a roll-out whose new version fails, the previous agent has the node."""
    found = {
        pod["spec"]["nodeName"]: pod
        for pod in sorted(pods, key=_rank)
        if _is_owned(pod, daemonset) and _is_running(pod)
    }
    return [
        AgentPod(pod["metadata"]["name"], node, _is_ready(pod), _problem(pod))
        for node, pod in sorted(found.items())
    ]


def _rank(pod: Object) -> tuple[bool, str]:
    """In ascending order of preference."""
    return not _problem(pod), str(pod["metadata"]["creationTimestamp"])


def _is_owned(pod: Object, daemonset: str) -> bool:
    return any(
        (owner["kind"], owner["name"]) == ("DaemonSet", daemonset)
        for owner in pod["metadata"].get("ownerReferences", ())
    )


def _is_running(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "nodeName" in pod["spec"]


def _is_ready(pod: Object) -> bool:
    return any(
        (one["type"], one["status"]) == ("Ready", "True")
        for one in pod.get("status", {}).get("conditions", ())
    )


def _problem(pod: Object) -> str:
    """Why the agent's container does not run: kubectl exec reports only that it is not found."""
    for one in pod.get("status", {}).get("containerStatuses", ()):
        if one.get("name") == CONTAINER:
            for kind, state in (one.get("state") or {}).items():
                if kind != "running":
                    reason = state.get("reason") or kind
                    return f"its agent does not run: {reason} after {one['restartCount']} restarts"
    return ""

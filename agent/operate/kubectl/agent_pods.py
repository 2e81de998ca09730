"""The agents' pods, by their objects."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]

CONTAINER = "agent"
# As "--metrics-address=$(HOST_IP):9652".
_READ_PORT = re.compile(r"--metrics-address=.*:([1-9]\d{0,4})")


@dataclasses.dataclass(frozen=True, slots=True)
class AgentPod:
    """A running agent's pod, by its name. problem: why its container does not run, or empty;
    read_port: on which it serves answers to users, 0 for none."""

    name: str
    node: str
    is_ready: bool = True
    problem: str = ""
    read_port: int = 0


def youngest(pods: Iterable[Object], daemonset: str) -> list[AgentPod]:
    """Those of the DaemonSet whose pod runs, at most one for each node: the youngest whose
    container runs. In a roll-out whose new version fails, the previous agent has the node."""
    found = {
        pod["spec"]["nodeName"]: pod
        for pod in sorted(pods, key=_rank)
        if _is_owned(pod, daemonset) and _is_running(pod)
    }
    return [
        AgentPod(pod["metadata"]["name"], node, _is_ready(pod), _problem(pod), _read_port(pod))
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


def _read_port(pod: Object) -> int:
    for container in pod["spec"].get("containers", ()):
        if container.get("name") == CONTAINER:
            # The last one counts.
            for argument in reversed(container.get("args", ())):
                if found := _READ_PORT.fullmatch(argument):
                    return int(found[1])
    return 0

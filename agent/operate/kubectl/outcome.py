"""The outcome of a step: whether the pods of a namespace are in its mode, by their agents."""

import dataclasses
from collections import Counter

from agent.listing import listed
from agent.operate.kubectl import node_status
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.node_status import MODES, PodInForce
from agent.operate.text import printable


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """problems: pods whose gates lack their own mode; notes: pods whose own label or whose node's
    ceiling is a mode below the namespace's; one sentence each. silent: nodes that did not respond,
    with the problem. pods: how many are in the mode or above it; unconfirmed: how many pods of the
    namespace each silent node has."""

    problems: list[str]
    notes: list[str]
    silent: dict[str, str]
    pods: int
    unconfirmed: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.problems and not self.silent


def read(cluster: Cluster, namespace: str, mode: str) -> Outcome:
    """What the agents of all nodes report now. Raises `KubectlError`."""
    nodes = [node_status.read(answer) for answer in node_status.query(cluster)]
    pods = [pod for node in nodes for pod in node.pods if pod.namespace == namespace]
    problems = [_unsettled(pod) for pod in pods if not pod.is_as_desired]
    below = [pod.name for pod in pods if pod.is_as_desired and _is_below(pod, mode)]
    notes = (
        [
            f"{len(below)} pods stay below {mode} by their own label or their node's ceiling: "
            f"{listed(below)}."
        ]
        if below
        else []
    )
    in_mode = sum(pod.is_as_desired and not _is_below(pod, mode) for pod in pods)
    silent = {node.node: node.problem for node in nodes if node.problem}
    unconfirmed: Counter[str] = Counter()
    if silent:
        found = cluster.items("pods", f"--namespace={namespace}")
        unconfirmed.update(one["spec"].get("nodeName", "") for one in found if is_gated(one))
    return Outcome(problems, notes, silent, in_mode, dict(unconfirmed))


def is_gated(pod: Object) -> bool:
    """Whether it runs on a network of its own."""
    is_running = pod.get("status", {}).get("phase") == "Running"
    return is_running and not pod["spec"].get("hostNetwork")


def _unsettled(pod: PodInForce) -> str:
    return printable(
        f"{pod.namespace}/{pod.name} on {pod.node} is not in {pod.desired}, its gates are in "
        f"{pod.in_force} ({pod.reason}): {pod.message}"
    )


def _is_below(pod: PodInForce, mode: str) -> bool:
    return pod.in_force not in MODES or MODES.index(pod.in_force) < MODES.index(mode)

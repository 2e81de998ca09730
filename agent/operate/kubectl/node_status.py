"""What one node's agent reports by `podgate status`, as the plugin compares it.

An agent of another version may lack a field or add some: what is missing counts as unknown.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from agent import VERSION
from agent.admin import finding_kinds as kinds
from agent.labels import ISOLATION_READY
from agent.listing import listed
from agent.operate.kubectl import findings
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import Cluster, NodeAnswer, Object, ReadAnswer
from agent.operate.kubectl.findings import Finding

# By the condition's reason, in ascending order of what is closed.
_MODES = {"Off": "off", "Audit": "audit", "Enforced": "enforce", "Strict": "strict"}
MODES = tuple(_MODES.values())
_UNKNOWN = "unknown"
_WITHOUT_AGENT = {
    kind.name
    for kind in (
        *(kinds.AGENT_DEAD, kinds.AGENT_HUNG, kinds.AGENT_STARTING),
        *(kinds.AGENT_MISSING, kinds.AGENT_UNREADABLE),
        *(kinds.GATES_OPEN, kinds.GATES_OPEN_SOON),
        *(kinds.DECLARED_PORTS_OPEN, kinds.PORTS_OPEN_SOON),
    )
}
# Pods that are part of the node.
_NEVER_GATED = "HostNetwork"


@dataclasses.dataclass(frozen=True, slots=True)
class PodInForce:
    """A pod of a node. desired: its mode; in_force: the mode that its gates have, "none" without;
    reason, message: of its condition."""

    node: str
    namespace: str
    name: str
    desired: str
    in_force: str
    reason: str
    message: str

    @property
    def is_as_desired(self) -> bool:
        return self.desired == self.in_force


@dataclasses.dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node. problem: why its agent did not answer, or empty; then only findings are known.

    kubelet: path of its cgroup, empty if it is not identified; desired, in_force: pods by
    mode, without those of the host network.
    """

    node: str
    problem: str = ""
    version: str = ""
    is_ready: bool = False
    kubelet: str = ""
    default_mode: str = ""
    max_mode: str = ""
    max_mode_from: str = ""
    findings: tuple[Finding, ...] = ()
    desired: dict[str, int] = dataclasses.field(default_factory=dict)
    in_force: dict[str, int] = dataclasses.field(default_factory=dict)
    pods: tuple[PodInForce, ...] = ()


def query(
    cluster: Cluster,
    nodes: Iterable[str] | None = None,
    *,
    is_fresh: bool = True,
    agents: Iterable[AgentPod] | None = None,
) -> list[NodeAnswer]:
    """Reports of agents, of all nodes or some. Without an agent `podgate status` reads the gates
    from the kernel and prints another report, which is a problem here.

    is_fresh: made for this request; otherwise it may be some seconds old; agents: if the caller has
    read them.
    """
    read = None if is_fresh else ReadAnswer("status")
    answers = cluster.query_nodes(
        *("podgate", "status", "--output=json"), nodes=nodes, read=read, agents=agents
    )
    return [
        dataclasses.replace(answer, problem=problem)
        if (problem := _without_agent(answer.output))
        else answer
        for answer in answers
    ]


def read(answer: NodeAnswer) -> NodeStatus:
    """From the output of `podgate status --output=json`, or the reason why there is none."""
    report = decode(answer.output) or {}
    if answer.problem:
        of_pins = findings.read(answer.node, report.get("findings"))
        if not of_pins:
            is_selected = answer.is_selected
            of_pins = [findings.no_answer(answer.node, answer.problem, is_selected=is_selected)]
        return NodeStatus(answer.node, answer.problem, findings=tuple(of_pins))
    if not report or not isinstance(report.get("pods", []), list):
        problem = "its agent's answer is not readable; is it another version?"
        return NodeStatus(
            answer.node, problem, findings=(findings.no_answer(answer.node, problem),)
        )
    pods = tuple(
        found for pod in report.get("pods", ()) if (found := _pod(answer.node, pod)) is not None
    )
    return NodeStatus(
        answer.node,
        version=_text(report, "version") or _UNKNOWN,
        is_ready=answer.is_ready,
        kubelet=_text(report, "kubelet"),
        default_mode=_text(report, "defaultMode") or _UNKNOWN,
        max_mode=_text(report, "maxMode") or _UNKNOWN,
        max_mode_from=_text(report, "maxModeFrom"),
        findings=tuple(findings.read(answer.node, report.get("findings"))),
        desired=_by_mode(pod.desired for pod in pods),
        in_force=_by_mode(pod.in_force for pod in pods),
        pods=pods,
    )


def decode(text: str) -> Object | None:
    """An agent's answer; None if it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def version_notes(nodes: list[NodeStatus]) -> list[str]:
    """One sentence if agents have another version than the plugin."""
    others = sorted({one.version for one in nodes if one.version not in ("", VERSION)})
    if not others:
        return []
    names = [one.node for one in nodes if one.version in others]
    return [
        f"This plugin is version {VERSION}, agents on {listed(names)} are "
        f"{', '.join(others)}: what only one of them has is not shown."
    ]


def _without_agent(output: str) -> str:
    """What is in force without the agent and until when, without the last full stop; empty for an
    agent's own report."""
    report = decode(output)
    if report is None or "gates" not in report or "pods" in report:
        return ""
    found = report.get("findings") or ()
    sentences = [_text(one, "sentence") for one in found if one.get("kind") in _WITHOUT_AGENT]
    return " ".join(sentences).removesuffix(".") or "no agent responds"


def _pod(node: str, pod: Any) -> PodInForce | None:
    if not isinstance(pod, dict):
        return None
    conditions = [one for one in pod.get("conditions", ()) if one.get("type") == ISOLATION_READY]
    condition = conditions[0] if conditions else {}
    reason = _text(condition, "reason")
    if reason == _NEVER_GATED:
        return None
    is_in_place = condition.get("status") == "True"
    return PodInForce(
        node,
        _text(pod, "namespace"),
        _text(pod, "name"),
        _text(pod, "mode"),
        _MODES.get(reason, "none") if is_in_place else "none",
        reason or "Pending",
        _text(condition, "message") or "The agent has not published its condition yet.",
    )


def _by_mode(modes: Any) -> dict[str, int]:
    counts = Counter(modes)
    return {mode: counts[mode] for mode in MODES if counts[mode]}


def _text(thing: Object, key: str) -> str:
    value = thing.get(key)
    return value if isinstance(value, str) else ""

"""A cluster in one sentence: how many nodes are in order, and pods by mode."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from agent.operate.kubectl import findings
from agent.operate.kubectl.node_status import MODES, NodeStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of nodes, each counted once, and of pods by mode, those of the host network left
    out. silent: nodes whose agent does not answer."""

    nodes: int
    in_order: int
    with_findings: int
    silent: int
    desired: dict[str, int]
    in_force: dict[str, int]

    def text(self) -> str:
        """As "3 nodes: 1 in order, 1 with findings, 1 without an answer. Pods: 8/9 strict."."""
        counts = [f"{self.in_order} in order"]
        if self.with_findings:
            counts.append(f"{self.with_findings} with findings")
        if self.silent:
            counts.append(f"{self.silent} without an answer")
        noun = "node" if self.nodes == 1 else "nodes"
        pods = by_mode(self.in_force, self.desired)
        return f"{self.nodes} {noun}: {', '.join(counts)}. Pods: {pods}."


def summarize(nodes: Sequence[NodeStatus]) -> Summary:
    desired: Counter[str] = Counter()
    in_force: Counter[str] = Counter()
    for node in nodes:
        desired.update(node.desired)
        in_force.update(node.in_force)
    silent = sum(bool(node.problem) for node in nodes)
    in_order = sum(is_in_order(node) for node in nodes)
    return Summary(
        len(nodes), in_order, len(nodes) - in_order - silent, silent, dict(desired), dict(in_force)
    )


def is_in_order(node: NodeStatus) -> bool:
    """Whether its agent answers and is ready, and nothing is wrong there but notes."""
    is_answered = not node.problem and node.is_ready and bool(node.kubelet)
    has_findings = any(findings.is_problem(one) for one in node.findings)
    return is_answered and not has_findings and node.desired == node.in_force


def worst_first(nodes: Sequence[NodeStatus]) -> list[NodeStatus]:
    """Nodes without an answer, then others that are not in order, then the rest; by name."""
    return sorted(nodes, key=lambda node: (not node.problem, is_in_order(node), node.node))


def by_mode(in_force: dict[str, int], desired: dict[str, int]) -> str:
    """As "3/3 enforce, 1/2 strict": in force/desired."""
    words = [
        f"{in_force.get(mode, 0)}/{desired.get(mode, 0)} {mode}"
        for mode in MODES
        if mode in in_force or mode in desired
    ]
    return ", ".join(words) or "none"

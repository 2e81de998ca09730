"""Findings of the agents of many nodes: read from their reports, and merged."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agent.admin.finding_kinds import NO_ANSWER, NODE_LEFT, Kind, Severity
from agent.listing import listed
from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import Object
from agent.operate.kubectl.printing import Cell
from agent.operate.text import printable

CLUSTER = "cluster"
"""The subject of a finding of no node."""

# Of pods that all fail in their own way, these are enough.
_MAX_OF_A_KIND = 5
_COLOURS = {
    Severity.OPEN: printing.RED,
    Severity.BROKEN: printing.RED,
    Severity.DEGRADED: printing.YELLOW,
    Severity.NOTE: 0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One finding of one node. Fields as in the node's report."""

    node: str
    severity: str
    kind: str
    subject: str
    sentence: str
    remedy: str = ""
    next_command: str = ""
    since: str = ""
    pods: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return Severity.of(self.severity).rank

    @property
    def pod_names(self) -> tuple[str, ...]:
        """All pods that it concerns, "namespace/name"."""
        what, _, name = self.subject.partition(" ")
        return (name,) if what == "pod" else self.pods


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """A finding that several nodes or pods have."""

    finding: Finding
    nodes: tuple[str, ...]
    pods: tuple[str, ...]

    @property
    def places(self) -> str:
        """Where it is found."""
        if len(self.pods) == 1 and self.finding.subject.startswith("pod "):
            return f"{self.pods[0]} on {listed(self.nodes)}"
        words = listed([node for node in self.nodes if node]) or CLUSTER
        if len(self.nodes) > 1:
            words = f"{len(self.nodes)} nodes ({words})"
        if self.pods:
            words += f", {len(self.pods)} pods ({listed(self.pods)})"
        return words


def read(node: str, found: Any) -> list[Finding]:
    """From the list `findings` of a report; of another version as much as it has."""
    if not isinstance(found, list):
        return []
    return [_read(node, one) for one in found if isinstance(one, dict)]


def no_answer(node: str, problem: str, *, is_selected: bool = True) -> Finding:
    """Of a node whose agent did not answer. is_selected: by the DaemonSet."""
    kind = NO_ANSWER if is_selected else NODE_LEFT
    text = f"{problem[:1].upper()}{problem[1:].rstrip('.')}."
    return Finding(node, kind.severity, kind.name, "node", text, kind.remedy, kind.command)


def of_cluster(kind: Kind, text: str, subject: str = CLUSTER) -> Finding:
    """Of no node. text: its sentence; subject: with a word before the name, as in "policy a"."""
    command = kind.command.format(name=subject.partition(" ")[2])
    return Finding("", kind.severity, kind.name, subject, text, kind.remedy, command)


def merge(findings: Iterable[Finding]) -> list[Merged]:
    """Equal ones once, the worst first, then those of most nodes and pods."""
    same: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        # A pod's finding is that of others of its Deployment.
        subject = "pod" if one.subject.startswith("pod ") else one.subject
        same.setdefault((subject, one.sentence), []).append(one)
    merged = [
        Merged(
            min(group, key=lambda one: one.rank),
            tuple(dict.fromkeys(one.node for one in group)),
            tuple(dict.fromkeys(name for one in group for name in one.pod_names)),
        )
        for group in same.values()
    ]
    return sorted(merged, key=lambda one: (one.finding.rank, -len(one.nodes), -len(one.pods)))


def show(merged: Sequence[Merged], *, with_advice: bool) -> None:
    """A line for each; without advice, a few of each kind."""
    counts: Counter[str] = Counter()
    for one in merged:
        finding = one.finding
        counts[finding.kind] += 1
        if counts[finding.kind] > _MAX_OF_A_KIND and not with_advice:
            continue
        mark = printing.coloured(Cell(finding.severity, _COLOURS[Severity.of(finding.severity)]))
        text = f"{one.places}: {finding.sentence}"
        if with_advice:
            command = f"Next: {finding.next_command}" if finding.next_command else ""
            text = " ".join(filter(None, (text, finding.remedy, command)))
        printing.line(f"{mark} {printable(text)}")
    for kind, count in counts.items():
        if count > _MAX_OF_A_KIND and not with_advice:
            printing.line(f"{count - _MAX_OF_A_KIND} more of kind {kind}: '-o wide' has all.")


def is_problem(finding: Finding) -> bool:
    """Whether it is more than a note."""
    return Severity.of(finding.severity) is not Severity.NOTE


def of_pod(findings: Iterable[Finding], name: str) -> Iterator[Finding]:
    """Those that concern a pod, "namespace/name"."""
    return (one for one in findings if name in one.pod_names)


def _read(node: str, one: Object) -> Finding:
    def text(key: str) -> str:
        value = one.get(key)
        return value if isinstance(value, str) else ""

    pods = one.get("pods")
    return Finding(
        node,
        Severity.of(text("severity")).value,
        *(text("kind"), text("subject") or "node", text("sentence"), text("remedy")),
        *(text("nextCommand"), text("since")),
        tuple(str(pod) for pod in pods) if isinstance(pods, list) else (),
    )

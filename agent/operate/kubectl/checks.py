"""Checks before a namespace is enforced: what has to be in order, and what will be dropped."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import findings, node_status, observed, printing, uncarried
from agent.operate.kubectl.cluster import Cluster, NodeAnswer, Object
from agent.operate.kubectl.observed import NodeObservations

_ISOLATION_READY = "podgate.io/isolation-ready"
# Findings with which pods would be open, or lose their probes, once they are enforced.
_STOPPING = {
    kind.name for kind in (kinds.DECLARED_PORTS_OPEN, kinds.KUBELET_UNKNOWN, kinds.PODS_NOT_SYNCED)
}
_MODES = ("off", "audit", "enforce", "strict")


@dataclasses.dataclass(frozen=True, slots=True)
class Checks:
    """problems: one sentence each, which stop the step; notes: what it changes for users; nodes:
    what they have observed of the namespace until now."""

    problems: list[str]
    notes: list[str]
    nodes: list[NodeObservations]


def check(cluster: Cluster, namespace: str, mode: str) -> Checks:
    """Raises `KubectlError`."""
    statuses = node_status.query(cluster)
    reports = {one.node: json.loads(one.output) for one in statuses if not one.problem}
    pods = cluster.items("pods", f"--namespace={namespace}")
    nodes = observed.collect(cluster, f"--namespace={namespace}")
    merged = json.loads(
        observed.merged(cluster, nodes, f"--namespace={namespace}", "--output=json")
    )
    problems = [
        *_unreachable(statuses),
        *_of_agents(reports, mode),
        *_uncovered(pods, reports),
        *observed.problems([one for one in nodes if one.output]),
        *(f"No policy admits {name}." for name in _missing(merged, is_doubtful=False)),
    ]
    notes = [f"{name} will be dropped." for name in _missing(merged, is_doubtful=True)]
    return Checks(problems, notes + uncarried.sentences(pods), nodes)


def flows_text(flows: Object) -> str:
    """A source and its target, in words."""
    source = flows["cgroup"]
    if pod := flows.get("sourcePod"):
        source = f"pod {pod['namespace']}/{pod['name']}"
    if process := flows.get("process"):
        source = f"{process} in {source}"
    port = "many ports" if flows.get("hasManyPorts") else f"port {flows['port']}"
    target = flows["pod"]
    text = (
        f"{source} to {target['namespace']}/{target['name']}, protocol {flows['protocol']} {port}"
    )
    return "".join(c if c.isprintable() else "?" for c in text)


def _unreachable(statuses: Sequence[NodeAnswer]) -> Iterator[str]:
    for one in statuses:
        if one.problem:
            yield f"{one.node}: {one.problem}."


def _of_agents(reports: dict[str, Object], mode: str) -> Iterator[str]:
    for node, report in reports.items():
        for one in findings.read(node, report.get("findings")):
            if one.kind in _STOPPING:
                yield f"{node}: {one.sentence}"
        ceiling = report["maxMode"]
        if _MODES.index(ceiling) < _MODES.index(mode):
            yield f"{node}: its ceiling is {ceiling}, so pods there stay in {ceiling}."


def _uncovered(pods: Sequence[Object], reports: dict[str, Object]) -> Iterator[str]:
    """Running pods without a gate: those would not be enforced."""
    gated = {
        (pod["namespace"], pod["name"])
        for report in reports.values()
        for pod in report["pods"]
        for condition in pod["conditions"]
        if condition["type"] == _ISOLATION_READY and condition["status"] == "True"
    }
    bare = [
        pod["metadata"]["name"]
        for pod in pods
        if pod.get("status", {}).get("phase") == "Running"
        and not pod["spec"].get("hostNetwork")
        and (pod["metadata"]["namespace"], pod["metadata"]["name"]) not in gated
    ]
    if bare:
        yield f"{len(bare)} running pods have no gate in place: {printing.listed(bare)}."


def _missing(merged: Object, *, is_doubtful: bool) -> list[str]:
    """Sources that no policy admits. is_doubtful: those that need a decision, or the others."""
    found = {
        flows_text(one["flows"]): one["doubt"]
        for one in merged["flows"]
        if not one["isAdmitted"] and bool(one["doubt"]) == is_doubtful
    }
    return [f"{text} ({doubt})" if doubt else text for text, doubt in found.items()]

"""Checks before a namespace is enforced: what has to be in order, and what will be dropped."""

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence

from agent.admin import finding_kinds as kinds
from agent.listing import listed
from agent.operate.kubectl import findings, node_status, observed, outcome, uncarried
from agent.operate.kubectl.cluster import Cluster, NodeAnswer, Object
from agent.operate.kubectl.observed import NodeObservations

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
    silent = {one.node for one in statuses if one.problem}
    pods = cluster.items("pods", f"--namespace={namespace}")
    nodes = observed.collect(cluster, f"--namespace={namespace}")
    merged = json.loads(
        observed.merged(cluster, nodes, f"--namespace={namespace}", "--output=json")
    )
    problems = [
        *_unreachable(statuses),
        *_of_agents(reports, mode),
        *_uncovered([pod for pod in pods if pod["spec"].get("nodeName") not in silent], statuses),
        *_unconfirmed(pods, silent),
        *observed.problems([one for one in nodes if one.output]),
        *(f"No policy admits {name}." for name in _missing(merged, is_doubtful=False)),
    ]
    notes = [f"{name} will be dropped." for name in _missing(merged, is_doubtful=True)]
    return Checks(problems, notes + uncarried.sentences(pods), nodes)


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


def _uncovered(pods: Sequence[Object], statuses: Sequence[NodeAnswer]) -> Iterator[str]:
    """Running pods without a gate: those would not be enforced."""
    gated = {
        (pod.namespace, pod.name)
        for answer in statuses
        for pod in node_status.read(answer).pods
        if pod.in_force != "none"
    }
    bare = [
        pod["metadata"]["name"]
        for pod in pods
        if outcome.is_gated(pod)
        and (pod["metadata"]["namespace"], pod["metadata"]["name"]) not in gated
    ]
    if bare:
        yield f"{len(bare)} running pods have no gate in place: {listed(bare)}."


def _unconfirmed(pods: Sequence[Object], silent: Collection[str]) -> Iterator[str]:
    """Pods of nodes that did not answer."""
    names = [
        pod["metadata"]["name"]
        for pod in pods
        if pod["spec"].get("nodeName") in silent and outcome.is_gated(pod)
    ]
    if names:
        yield f"{len(names)} running pods are on nodes that do not answer: {listed(names)}."


def _missing(merged: Object, *, is_doubtful: bool) -> list[str]:
    """Sources that no policy admits. is_doubtful: those that need a decision, or the others."""
    found = {
        one["text"]: one["doubt"]
        for one in merged["flows"]
        if not one["isAdmitted"] and bool(one["doubt"]) == is_doubtful
    }
    return [f"{text} ({doubt})" if doubt else text for text, doubt in found.items()]

"""What all nodes have observed: the agents' `podgate suggest`, collected and merged."""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence

from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

DAY = datetime.timedelta(days=1)
_COMMAND = ("podgate", "suggest")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeObservations:
    """One node's. output: as `podgate suggest --output json` prints it, None without an answer;
    problem: why, in one sentence; observed: the time that it covers; is_young: whether the node has
    existed for less than a day."""

    node: str
    output: Object | None
    problem: str = ""
    observed: datetime.timedelta = datetime.timedelta()
    is_young: bool = False

    @property
    def sentence(self) -> str:
        """The time that it covers."""
        if self.output is None:
            return f"{self.node}: {self.problem}"
        young = ", a node younger than a day" if self.is_young else ""
        return f"{self.node}: {_hours(self.observed)} observed{young}"

    @property
    def flows(self) -> list[Object]:
        found: list[Object] = self.output["flows"] if self.output else []
        return found


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Options of `podgate suggest` that choose flows."""
    parser.add_argument("--namespace", "-n", action="append", default=[], help="Only its pods.")
    parser.add_argument("--pod", help="Only this pod, and those with the same lasting labels.")
    parser.add_argument("--since", help="Only what was seen since: 90m, 24h, 7d, or a time in UTC.")
    parser.add_argument("--min-count", metavar="N", help="Only sources with N packets to one port.")


def filters(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The same options for the agents."""
    further = {name: getattr(arguments, name) for name in ("pod", "since", "min_count")}
    return (
        *(f"--namespace={namespace}" for namespace in arguments.namespace),
        *(f"--{name.replace('_', '-')}={value}" for name, value in further.items() if value),
    )


def collect(cluster: Cluster, *options: str) -> list[NodeObservations]:
    """Of all nodes, in order of names."""
    created = {
        node["metadata"]["name"]: node["metadata"].get("creationTimestamp", "")
        for node in cluster.items("nodes")
    }
    answers = cluster.query_nodes(*_COMMAND, "--output=json", *options)
    found = []
    for answer in answers:
        if answer.problem:
            found.append(NodeObservations(answer.node, None, answer.problem))
            continue
        output = json.loads(answer.output)
        # As the node's clock has it: the operator's may differ.
        (node,) = output["nodes"]
        until = _time(node["until"])
        observed = until - _time(node["since"])
        observed -= datetime.timedelta(seconds=node["unobservedSeconds"])
        creation = created.get(answer.node)
        is_young = bool(creation) and until - _time(str(creation)) < DAY
        found.append(NodeObservations(answer.node, output, "", observed, is_young))
    return found


def merged(cluster: Cluster, nodes: Iterable[NodeObservations], *options: str) -> str:
    """The output of `podgate suggest` for all of these nodes together. Raises `KubectlError`."""
    content = [{"nodes": one.output["nodes"]} for one in nodes if one.output]
    answering = [one.node for one in nodes if one.output]
    if not answering:
        raise KubectlError("no agent responded; see 'kubectl podgate status'")
    # Any agent can merge; one that has just answered most likely does so again.
    (answer,) = cluster.query_nodes(
        *(*_COMMAND, "--from=-", *options), nodes=answering[:1], content=json.dumps(content)
    )
    if answer.problem:
        raise KubectlError(f"{answer.node}: {answer.problem}")
    return answer.output


def problems(nodes: Sequence[NodeObservations]) -> list[str]:
    """Why these observations do not suffice, one sentence each."""
    found = [f"{one.sentence}; what it has seen is missing." for one in nodes if one.problem]
    found += [
        f"{one.node} has observed {_hours(one.observed)}, less than a day."
        for one in nodes
        if one.output and one.observed < DAY and not one.is_young
    ]
    if not found and all(one.observed < DAY for one in nodes):
        found.append("No node has observed a day.")
    return found


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _hours(observed: datetime.timedelta) -> str:
    return f"{observed.total_seconds() / 3600:.1f} h"

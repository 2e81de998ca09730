"""`kubectl podgate status`: one line for each node."""

import argparse
import collections
import json

from agent.kubectl import printing
from agent.kubectl.cluster import Cluster, NodeAnswer


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Show the agent of each node."
    parser = commands.add_parser("status", help=text, description=text)
    parser.set_defaults(run=run)


def run(_: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node's agent did not respond."""
    answers = cluster.query_nodes("podgate", "status", "--output", "json")
    rows = [("NODE", "DEFAULT", "MAX", "PODS", "PROBLEM"), *map(_row, answers)]
    printing.table(rows)
    return int(any(answer.problem for answer in answers))


def _row(answer: NodeAnswer) -> tuple[str, ...]:
    if answer.problem:
        return (answer.node, "-", "-", "-", answer.problem)
    report = json.loads(answer.output)
    modes = collections.Counter(pod["mode"] for pod in report["pods"])
    pods = ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items())) or "0"
    problem = report.get("kubeletProblem") or report.get("openPorts") or ""
    return (answer.node, report["defaultMode"], report["maxMode"], pods, problem)

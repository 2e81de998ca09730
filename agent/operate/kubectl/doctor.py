"""`kubectl podgate doctor`: findings of `podgate doctor` on all nodes."""

import argparse
import json

from agent.operate.kubectl import output, printing
from agent.operate.kubectl.cluster import Cluster, NodeAnswer, Object
from agent.operate.kubectl.exit_status import NO, YES, of_nodes
from agent.operate.kubectl.printing import Cell

_COLOURS = {"ok": printing.GREEN, "warning": printing.YELLOW, "problem": printing.RED}
# The worst first.
_SEVERITIES = ("problem", "warning", "ok")


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="Check kernel, cluster and agent of each node.",
        description="Run 'podgate doctor' on each node, and show what it found together with the "
        "nodes that have it; wide also shows what is in order. Exit status 1 if there is a problem "
        "or a node does not answer, 3 if none does.",
    )
    output.add_option(parser)
    parser.add_argument("--node", action="append", metavar="NAME", help="This node only.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    answers = cluster.query_nodes(
        "podgate", "doctor", "--output=json", nodes=arguments.node, answers_with=(YES, NO)
    )
    found: list[Object] = []
    problems = {}
    for answer in answers:
        findings = _findings(answer)
        problems[answer.node] = answer.problem or (
            "its answer is not readable" if findings is None else ""
        )
        found += findings or []
    if arguments.output in (output.JSON, output.YAML):
        missing = {node: problem for node, problem in problems.items() if problem}
        output.write({"findings": found, "problems": missing}, arguments.output)
    else:
        _show(found, is_wide=arguments.output == output.WIDE)
    for node, problem in problems.items():
        if problem:
            printing.progress(f"{node}: {problem}")
    has_problem = any(one["severity"] == "problem" for one in found)
    return of_nodes(list(problems.values())) or (NO if has_problem else YES)


def _show(found: list[Object], *, is_wide: bool) -> None:
    """Nodes are alike: each finding once, with its nodes."""
    nodes: dict[tuple[str, str, str, str], list[str]] = {}
    for one in found:
        key = (one["severity"], one["check"], one["text"], one["remedy"])
        nodes.setdefault(key, []).append(one["node"])
    shown = [key for key in nodes if is_wide or key[0] != "ok"]
    for key in sorted(shown, key=lambda key: _SEVERITIES.index(key[0])):
        severity, check, text, remedy = key
        mark = printing.coloured(Cell(severity, _COLOURS[severity]))
        sentence = " ".join(filter(None, (text, remedy)))
        names = printing.listed(nodes[key])
        printing.line(f"{mark} {printing.clean(f'{check} on {names}: {sentence}')}")
    if not shown and found:
        printing.line("No problem was found.")


def _findings(answer: NodeAnswer) -> list[Object] | None:
    """With the node; None if the answer cannot be read."""
    if answer.problem:
        return []
    try:
        found = json.loads(answer.output)
    except ValueError:
        return None
    if isinstance(found, dict):
        found = found.get("findings")
    if not isinstance(found, list):
        return None
    return [
        {
            "node": answer.node,
            "check": str(one.get("check", "")),
            # One of a later version is at least worth reading.
            "severity": one["severity"] if one.get("severity") in _SEVERITIES else "warning",
            "text": str(one.get("text", "")),
            "remedy": str(one.get("remedy", "")),
        }
        for one in found
        if isinstance(one, dict)
    ]

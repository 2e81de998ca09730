"""`kubectl podgate doctor`: findings of `podgate doctor` on all nodes."""

import argparse
import dataclasses

from agent.admin.finding_kinds import Severity
from agent.listing import listed
from agent.operate.kubectl import cluster_findings, findings, node_status, output, printing
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.exit_status import NO, YES, of_nodes
from agent.operate.kubectl.findings import Finding, Merged
from agent.operate.kubectl.printing import Cell
from agent.operate.text import printable


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="Check kernel, cluster and agent of each node.",
        description="Run 'podgate doctor' on each node, and show what it found together with the "
        "nodes that have it; wide also shows what is in order. Exit status 1 if a finding is open "
        "or broken, or a node does not answer, 3 if none does.",
    )
    output.add_option(parser)
    parser.add_argument("--node", action="append", metavar="NAME", help="This node only.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    answers = cluster.query_nodes(
        "podgate", "doctor", "--output=json", nodes=arguments.node, answers_with=(YES, NO)
    )
    found = [] if arguments.node else cluster_findings.find(cluster)
    passed: dict[tuple[str, str], list[str]] = {}
    problems = {}
    is_selected = {answer.node: answer.is_selected for answer in answers}
    for answer in answers:
        report = {} if answer.problem else node_status.decode(answer.output)
        is_readable = report is not None and isinstance(report.get("findings", []), list)
        problems[answer.node] = answer.problem or (
            "" if is_readable else "its answer is not readable"
        )
        if report is None or not is_readable:
            continue
        found += findings.read(answer.node, report.get("findings"))
        for one in report.get("passed") or ():
            key = str(one.get("check", "")), str(one.get("text", ""))
            passed.setdefault(key, []).append(answer.node)
    found += [
        findings.no_answer(node, why, is_selected=is_selected[node])
        for node, why in problems.items()
        if why
    ]
    merged = findings.merge(found)
    if arguments.output in (output.JSON, output.YAML):
        missing = {node: problem for node, problem in problems.items() if problem}
        document = {
            "findings": [output.camel(dataclasses.asdict(one)) for one in merged],
            "passed": {check: nodes for (check, _), nodes in passed.items()},
            "problems": missing,
        }
        output.write(document, arguments.output)
    else:
        _show(merged, passed, is_wide=arguments.output == output.WIDE)
    return of_nodes(list(problems.values())) or (NO if any(map(_is_bad, found)) else YES)


def _is_bad(finding: Finding) -> bool:
    return Severity.of(finding.severity) in (Severity.OPEN, Severity.BROKEN)


def _show(merged: list[Merged], passed: dict[tuple[str, str], list[str]], *, is_wide: bool) -> None:
    """Nodes are alike: each finding once, with its nodes."""
    findings.show(merged, with_advice=True)
    if is_wide:
        mark = printing.coloured(Cell("ok", printing.GREEN))
        for (check, text), nodes in passed.items():
            words = f"{check} on {listed(nodes)}: {text}"
            printing.line(f"{mark} {printable(words)}")
    elif not merged and passed:
        printing.line("Nothing is wrong.")

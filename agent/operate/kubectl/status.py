"""`kubectl podgate status`: what is wrong, the cluster in one sentence, one line for each node, and
the pods that are not as desired."""

import argparse
import concurrent.futures
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable

from agent.operate.kubectl import (
    ceilings,
    cluster_findings,
    findings,
    node_reports,
    node_status,
    option_types,
    output,
    printing,
    summary,
)
from agent.operate.kubectl.cluster import Cluster, KubectlError, NodeAnswer
from agent.operate.kubectl.exit_status import of_nodes
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import NodeStatus, PodInForce
from agent.operate.kubectl.printing import Cell
from agent.operate.text import printable

# Home, and clear what is below (ECMA-48).
_CLEAR = "\x1b[H\x1b[J"
_PERIOD_SECONDS = 5.0
_COLOURS = {"off": printing.YELLOW, "audit": printing.YELLOW, "none": printing.RED}


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="Show what is wrong, the agent of each node, and pods that are not as desired.",
        description="Show the findings of all nodes, the worst first and equal ones once (wide: "
        "notes, too, and what to do); how many nodes are in order, and pods by mode; the "
        "agent of each node, those that are not in order first: its version, whether it is ready "
        "and has identified the kubelet, pods by mode (in force/desired), and the number of its "
        "findings that are more than a note; "
        "then the pods whose mode is not in force. Exit status 1 if a node does not answer, 3 if "
        "none does.",
    )
    output.add_option(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--node", action="append", metavar="NAME", help="This node only.")
    chosen.add_argument(
        "--selector", "-l", metavar="LABELS", help="Nodes with these labels, as for kubectl."
    )
    parser.add_argument(
        "--problems", action="store_true", help="Leave out the lines of nodes that are in order."
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="Query all agents. Otherwise, in a cluster of more than 100 nodes, the table counts "
        "nodes that are in order by their NodeReports.",
    )
    parser.add_argument(
        "--watch",
        "-w",
        nargs="?",
        type=option_types.seconds,
        const=_PERIOD_SECONDS,
        metavar="SECONDS",
        help="Show it again and again, with this time in between (5).",
    )
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    cluster: Cluster,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """1 if a node's agent did not respond; with --watch it ends by an interrupt."""
    if not arguments.watch:
        return _once(arguments, cluster)
    while True:
        if sys.stdout.isatty():
            printing.line(_CLEAR)
        printing.line(f"{datetime.datetime.now().astimezone():%H:%M:%S %Z}")
        try:
            _once(arguments, cluster)
        except KubectlError as error:
            # An API server that restarts is what a user may be watching.
            printing.progress(f"kubectl podgate: {error}")
        printing.line()
        sleep(arguments.watch)


def _once(arguments: argparse.Namespace, cluster: Cluster) -> int:
    chosen = arguments.node
    if arguments.selector:
        chosen = cluster.nodes_with(arguments.selector)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        of_cluster = None if chosen else pool.submit(cluster_findings.find, cluster)
        namespaces = pool.submit(ceilings.labelled_namespaces, cluster)
        nodes = _nodes(arguments, cluster, chosen)
        nodes = [ceilings.with_findings(node, namespaces.result()) for node in nodes]
        found = of_cluster.result() if of_cluster else []
    found += [one for node in nodes for one in node.findings]
    pods = [pod for node in nodes for pod in node.pods if not pod.is_as_desired]
    for note in node_status.version_notes(nodes):
        printing.progress(note)
    if arguments.output in (output.JSON, output.YAML):
        output.write(_document(nodes, pods, found), arguments.output)
    else:
        is_wide = arguments.output == output.WIDE
        _show(nodes, pods, found, is_wide=is_wide, only_problems=arguments.problems)
    return of_nodes([node.problem for node in nodes])


def _nodes(
    arguments: argparse.Namespace, cluster: Cluster, chosen: list[str] | None
) -> list[NodeStatus]:
    """By answers of agents; in a large cluster for the table alone, of nodes that are not in
    order."""
    is_complete = bool(chosen) or arguments.fresh or arguments.output != output.TABLE
    fleet = None if is_complete else node_reports.read(cluster)
    if fleet is None:
        return list(map(node_status.read, node_status.query(cluster, chosen, is_fresh=False)))
    if fleet.in_order:
        printing.progress(
            f"{len(fleet.in_order)} nodes by their NodeReports, whose numbers of pods are up to "
            "five minutes old; --fresh queries all agents."
        )
    answers: list[NodeAnswer] = []
    if fleet.others:
        answers = node_status.query(cluster, fleet.others, is_fresh=False, agents=fleet.agents)
    found = [*fleet.in_order.values(), *map(node_status.read, answers)]
    return sorted(found, key=lambda node: node.node)


def _show(
    nodes: list[NodeStatus],
    pods: list[PodInForce],
    found: list[Finding],
    *,
    is_wide: bool,
    only_problems: bool,
) -> None:
    merged = findings.merge(one for one in found if is_wide or findings.is_problem(one))
    findings.show(merged, with_advice=is_wide)
    if merged:
        printing.line()
    printing.line(summary.summarize(nodes).text())
    shown = summary.worst_first(nodes)
    if only_problems:
        shown = [node for node in shown if not summary.is_in_order(node)]
    if shown:
        _show_nodes(shown, is_wide=is_wide)
    if pods:
        if shown:
            printing.line()
        printing.table([("POD", "NODE", "DESIRED", "IN FORCE", "REASON"), *map(_pod_row, pods)])
        if is_wide:
            for pod in pods:
                printing.line(printable(f"{pod.namespace}/{pod.name}: {pod.message}"))


def _show_nodes(nodes: list[NodeStatus], *, is_wide: bool) -> None:
    head = ("NODE", "VERSION", "READY", "KUBELET", "FINDINGS")
    further = ("DEFAULT", "MAX", "KUBELET CGROUP") if is_wide else ()
    printing.table([(*head, *further, "PODS"), *(_row(node, is_wide=is_wide) for node in nodes)])


def _row(node: NodeStatus, *, is_wide: bool) -> tuple[str | Cell, ...]:
    if node.problem:
        unknown = ("-",) * (6 if is_wide else 3)
        number = Cell(str(len(node.findings)), printing.RED)
        return (node.node, *unknown[:3], number, *unknown[3:], Cell("no answer", printing.RED))
    count = sum(findings.is_problem(one) for one in node.findings)
    further = (node.default_mode, node.max_mode, node.kubelet or "-") if is_wide else ()
    return (
        node.node,
        node.version,
        "yes" if node.is_ready else Cell("no", printing.YELLOW),
        "yes" if node.kubelet else Cell("no", printing.YELLOW),
        Cell(str(count), printing.YELLOW if count else 0),
        *further,
        _modes(node),
    )


def _modes(node: NodeStatus) -> Cell:
    colour = 0 if node.in_force == node.desired else printing.YELLOW
    return Cell(summary.by_mode(node.in_force, node.desired), colour)


def _pod_row(pod: PodInForce) -> tuple[str | Cell, ...]:
    in_force = Cell(pod.in_force, _COLOURS.get(pod.in_force, 0))
    return (f"{pod.namespace}/{pod.name}", pod.node, pod.desired, in_force, pod.reason)


def _document(
    nodes: list[NodeStatus], pods: list[PodInForce], found: list[Finding]
) -> dict[str, object]:
    documents = [output.camel(dataclasses.asdict(node)) for node in nodes]
    for document in documents:
        del document["pods"]
    return {
        "summary": output.camel(dataclasses.asdict(summary.summarize(nodes))),
        "findings": [output.camel(dataclasses.asdict(one)) for one in findings.merge(found)],
        "nodes": documents,
        "podsNotAsDesired": [output.camel(dataclasses.asdict(pod)) for pod in pods],
    }

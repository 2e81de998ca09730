"""`kubectl podgate status`: what is wrong, the cluster in one sentence, one line for each node, and
the pods that are not as desired."""

import argparse
import dataclasses

from agent.operate.kubectl import (
    ceilings,
    cluster_findings,
    findings,
    node_status,
    output,
    printing,
    summary,
)
from agent.operate.kubectl.cluster import Cluster, KubectlError, is_forbidden
from agent.operate.kubectl.exit_status import of_nodes
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import NodeStatus, PodInForce
from agent.operate.kubectl.printing import Cell
from agent.operate.text import printable

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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node's agent did not respond."""
    chosen = arguments.node
    if arguments.selector:
        chosen = cluster.nodes_with(arguments.selector)
    answers = node_status.query(cluster, chosen, is_fresh=False)
    namespaces = ceilings.labelled_namespaces(cluster)
    nodes = [ceilings.with_findings(node_status.read(one), namespaces) for one in answers]
    found = [] if chosen else _of_cluster(cluster)
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


def _of_cluster(cluster: Cluster) -> list[Finding]:
    try:
        return cluster_findings.find(cluster)
    except KubectlError as error:
        if not is_forbidden(error):
            raise
        printing.progress(f"Findings of the cluster are missing: {error}")
        return []


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

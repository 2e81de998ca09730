"""`kubectl podgate why-not-ready POD`: what Ready lacks, by the API server and the node's agent."""

import argparse
import dataclasses

from agent.operate.kubectl import node_status, output, pods, printing, readiness
from agent.operate.kubectl.cluster import (
    Cluster,
    KubectlError,
    Object,
    ReadAnswer,
    is_forbidden,
    is_missing,
)
from agent.operate.kubectl.exit_status import NO, YES
from agent.operate.kubectl.node_status import NodeStatus
from agent.operate.kubectl.printing import Cell
from agent.operate.kubectl.readiness import ReadinessCheck
from agent.operate.text import printable


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "why-not-ready",
        help="Explain why a pod is not Ready.",
        description="Explain why a pod is not Ready, in the order of what it needs: node, "
        "sandbox, containers and probes, readiness gates, and what the node's agent knows. Ends "
        "with the command to run next. Exit status 0 if the pod is Ready, 1 if not.",
    )
    pods.add_arguments(parser)
    output.add_option(parser, (output.TABLE, output.JSON, output.YAML))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    pod = pods.get(cluster, arguments.pod, arguments.namespace)
    metadata = pod["metadata"]
    events = cluster.items(
        "events",
        f"--namespace={metadata['namespace']}",
        f"--field-selector=involvedObject.uid={metadata['uid']}",
    )
    agent, command, not_read = _agent(cluster, pod)
    found = readiness.findings(
        pod,
        events,
        node=_node(cluster, pod),
        agent=agent,
        agent_command=command,
        explanation=_explanation(cluster, pod) if command else None,
    )
    is_ready = readiness.is_ready(pod)
    next_commands = [one.next_command for one in found if not one.is_met and one.next_command]
    next_command = "" if is_ready else (next_commands or ["kubectl podgate status"])[0]
    if not_read:
        printing.progress(f"What the node's agent knows is missing: {not_read}")
    if agent is not None:
        for note in node_status.version_notes([agent]):
            printing.progress(note)
    if arguments.output == output.TABLE:
        _show(pod, found, next_command, is_ready=is_ready)
    else:
        document = {
            "pod": pods.full_name(pod),
            "isReady": is_ready,
            "findings": [output.camel(dataclasses.asdict(one)) for one in found],
            "nextCommand": next_command,
            "notRead": not_read,
        }
        output.write(document, arguments.output)
    return YES if is_ready else NO


def _show(pod: Object, found: list[ReadinessCheck], next_command: str, *, is_ready: bool) -> None:
    head = Cell("Ready", printing.GREEN) if is_ready else Cell("not Ready", printing.YELLOW)
    printing.line(f"Pod {printable(pods.full_name(pod))} is {printing.coloured(head)}.")
    for one in found:
        mark = Cell("+", printing.GREEN) if one.is_met else Cell("-", printing.RED)
        text = printable(f"{one.subject}: {one.text}")
        printing.line(f"{printing.coloured(mark)} {text}")
    if next_command:
        printing.line(f"Next: {printable(next_command)}")


def _node(cluster: Cluster, pod: Object) -> Object | None:
    """None without one; empty if the user may not get it."""
    if not (name := pod["spec"].get("nodeName")):
        return None
    try:
        return cluster.get("node", name)
    except KubectlError as error:
        if is_missing(error):
            return None
        if is_forbidden(error):
            printing.progress(f"The state of node {name} is missing: {error}")
            return {}
        raise


def _explanation(cluster: Cluster, pod: Object) -> Object | None:
    """None if the agent is of a version without it, or does not know the pod."""
    (answer,) = cluster.query_nodes(
        *("podgate", "explain", "pod", pods.full_name(pod), "--output=json"),
        nodes=[pods.node_of(pod)],
        answers_with=(YES, NO),
        read=ReadAnswer("explain-pod", {"pod": pods.full_name(pod)}),
    )
    return None if answer.problem else node_status.decode(answer.output)


def _agent(cluster: Cluster, pod: Object) -> tuple[NodeStatus | None, str, str]:
    """The status of the agent of the pod's node, how to run a command there, and why a user without
    rights in podgate's namespace gets neither."""
    if not (name := pod["spec"].get("nodeName")):
        return None, "", ""
    try:
        return *_answered(cluster, name), ""
    except KubectlError as error:
        if not is_forbidden(error):
            raise
        return None, "", str(error)


def _answered(cluster: Cluster, name: str) -> tuple[NodeStatus, str]:
    (answer,) = node_status.query(cluster, [name], is_fresh=False)
    agents = [one for one in cluster.agents() if one.node == name and not one.problem]
    place = " ".join(cluster.place(agents[0].name)) if agents else ""
    return node_status.read(answer), f"kubectl exec {place} --" if place else ""

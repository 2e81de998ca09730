"""`kubectl podgate exec`: any command of podgate on one node, also while its agent cannot start."""

import argparse
import contextlib
import sys

from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.debug_pods import DebugPods
from agent.operate.kubectl.exit_status import NO_AGENT


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "exec",
        help="Run a command of podgate on a node, such as 'exec NODE maps'.",
        description="Run a command of podgate on a node, in the agent's container; if that does "
        "not run, in a pod of its image that is made for that time. The exit status is the "
        "command's, or 3 if the node cannot be reached.",
    )
    parser.add_argument("node", metavar="NODE")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="As on it.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """The command's exit status."""
    command = [one for one in arguments.command[:1] if one != "--"] + arguments.command[1:]
    with contextlib.closing(DebugPods(cluster)) as debug_pods:
        (answer,) = cluster.query_nodes(
            *("podgate", *command),
            nodes=[arguments.node],
            answers_with=range(256),
            debug_pods=debug_pods,
        )
    sys.stdout.write(answer.output)
    if answer.problem:
        printing.progress(f"kubectl podgate: {answer.node}: {answer.problem}")
        return answer.exit_status or NO_AGENT
    return answer.exit_status

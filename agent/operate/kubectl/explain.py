"""`kubectl podgate explain`: the verdict of one flow, by the agent of the pod's node."""

import argparse
import sys

from agent.operate.kubectl import output, pods, printing
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.exit_status import NO, NO_AGENT, YES


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "explain",
        help="Explain the verdict of a flow from a node to one of its pods.",
        description="Explain whether a process of the pod's node may open a flow to the pod, and "
        "which rule or step decides that, by 'podgate explain' on that node. Exit status 0 if it "
        "may, 1 if not, 3 if the node's agent does not answer.",
    )
    output.add_option(parser)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help="As for 'podgate explain': on the pod's node.",
    )
    parser.add_argument(
        "--to", required=True, metavar="POD", help="The pod's name, or namespace/name."
    )
    parser.add_argument("--namespace", "-n", help="The pod's namespace (default: the context's).")
    parser.add_argument("--port", required=True, type=_port, help="The pod's port.")
    parser.add_argument("--protocol", help="As for 'podgate explain'.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    pod = pods.get(cluster, arguments.to, arguments.namespace)
    protocol = (f"--protocol={arguments.protocol}",) if arguments.protocol else ()
    (answer,) = cluster.query_nodes(
        *("podgate", "explain", f"--output={arguments.output}", f"--from={arguments.source}"),
        *(f"--to={pods.full_name(pod)}", f"--port={arguments.port}", *protocol),
        nodes=[pods.node_of(pod)],
        answers_with=(YES, NO),
    )
    if answer.problem:
        printing.progress(f"kubectl podgate: {answer.node}: {answer.problem}")
        return answer.exit_status or NO_AGENT
    sys.stdout.write(answer.output)
    return answer.exit_status


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("0 to 65535")
    return port

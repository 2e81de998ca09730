"""`kubectl podgate explain`: the verdict of one flow, by the agent of its node."""

import argparse
import ipaddress
import sys

from agent.operate.kubectl import output, pods, printing
from agent.operate.kubectl.cluster import Cluster, KubectlError
from agent.operate.kubectl.exit_status import NO, NO_AGENT, YES


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "explain",
        help="Explain the verdict of a flow from a node to one of its pods, or to an address.",
        description="Explain whether a process of a node may open a flow to one of the node's pods "
        "or, if a HostEgressPolicy is about the process, to an address, and which rule or step "
        "decides that, by 'podgate explain' on that node. Exit status 0 if it may, 1 if not, 3 if "
        "the node's agent does not answer.",
    )
    output.add_option(parser)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help="As for 'podgate explain': on that node.",
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="POD|ADDRESS",
        help="The pod's name, or namespace/name; or an address, for HostEgressPolicies.",
    )
    parser.add_argument("--namespace", "-n", help="The pod's namespace (default: the context's).")
    parser.add_argument(
        "--node",
        help="With an address in --to: the node of the process. It may be left out if --from "
        "names a pod.",
    )
    parser.add_argument("--port", required=True, type=_port, help="The destination's port.")
    parser.add_argument("--protocol", help="As for 'podgate explain'.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    to, node = _destination(arguments, cluster)
    protocol = (f"--protocol={arguments.protocol}",) if arguments.protocol else ()
    (answer,) = cluster.query_nodes(
        *("podgate", "explain", f"--output={arguments.output}", f"--from={arguments.source}"),
        *(f"--to={to}", f"--port={arguments.port}", *protocol),
        nodes=[node],
        answers_with=(YES, NO),
    )
    if answer.problem:
        printing.progress(f"kubectl podgate: {answer.node}: {answer.problem}")
        return answer.exit_status or NO_AGENT
    sys.stdout.write(answer.output)
    return answer.exit_status


def _destination(arguments: argparse.Namespace, cluster: Cluster) -> tuple[str, str]:
    """As the node's command takes it, and the node. Raises `KubectlError`."""
    try:
        ipaddress.ip_address(arguments.to)
    except ValueError:
        if arguments.node:
            raise KubectlError("--node is for an address in --to; a pod has its own") from None
        pod = pods.get(cluster, arguments.to, arguments.namespace)
        return pods.full_name(pod), pods.node_of(pod)
    if arguments.node:
        return arguments.to, arguments.node
    kind, _, name = arguments.source.partition(":")
    if kind != "pod":
        raise KubectlError("an address in --to needs --node, or pod:NAMESPACE/NAME in --from")
    return arguments.to, pods.node_of(pods.get(cluster, name, arguments.namespace))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("0 to 65535")
    return port

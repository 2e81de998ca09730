"""`kubectl podgate verify`: host processes try to reach pods, from a pod on each node's network."""

import argparse

from agent.operate.kubectl import output, printing
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.exit_status import NO
from agent.operate.kubectl.verification import reports, running
from agent.operate.kubectl.verification.access import KubectlAccess
from agent.operate.kubectl.verification.node_run import AGENT, POD
from agent.operate.kubectl.verification.running import Options

_HTML, _JUNIT = "html", "junit"
_FORMATS = (output.TABLE, output.JSON, output.YAML, _HTML, _JUNIT)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="Show that host processes do not reach pods, and that the kubelet does.",
        description="On each node make a canary pod for each closed mode, and from a pod on the "
        "node's network try to reach it over TCP, UDP and ICMP; also pods with the label "
        "podgate.io/verify=true. All pods that it makes are deleted at its end. The exit status is "
        "1 if a pod is open that should be closed, if the kubelet does not reach one, or if a node "
        "was not tried.",
    )
    parser.add_argument(
        "--namespace",
        "-n",
        default="",
        help="Make the canaries in this namespace, with its mode, and try its pods only.",
    )
    parser.add_argument("--node", action="append", default=[], metavar="NODE", help="Only these.")
    parser.add_argument(
        "--mode",
        action="append",
        choices=running.MODES,
        help="Only canaries of this mode, where --namespace is not given.",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=5,
        metavar="NUMBER",
        help="Most pods of a node with the label (default: 5).",
    )
    parser.add_argument("--no-canaries", action="store_true", help="Try only pods with the label.")
    parser.add_argument(
        "--from",
        dest="origin",
        choices=(POD, AGENT),
        default="",
        help="From a pod on the node's network, or from the agent's container. Without it, from "
        "a pod, or from the agent where such pods are forbidden.",
    )
    parser.add_argument("--image", default="", help="Of podgate, where it is not installed yet.")
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="Time for canaries to be in their mode (default: 60).",
    )
    output.add_option(parser, _FORMATS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 unless all is as it should be."""
    options = Options(
        namespace=cluster.namespace,
        of=arguments.namespace,
        nodes=tuple(arguments.node),
        modes=tuple(arguments.mode or running.MODES),
        samples=arguments.samples,
        image=arguments.image,
        origin=arguments.origin,
        wait_seconds=arguments.wait,
        has_canaries=not arguments.no_canaries,
    )
    report = running.run(KubectlAccess(cluster), options)
    if arguments.output == output.TABLE:
        for sentence in report.sentences():
            printing.line(sentence)
        if report.paths:
            printing.line()
            printing.table(reports.rows(report))
    elif arguments.output == _HTML:
        printing.line(reports.as_html(report))
    elif arguments.output == _JUNIT:
        printing.line(reports.as_junit(report))
    else:
        output.write(reports.as_json(report), arguments.output)
    return 0 if report.is_well else NO

"""`kubectl podgate suggest`: policies for what all nodes have observed."""

import argparse

from agent.operate.kubectl import observed, printing, uncarried
from agent.operate.kubectl.cluster import Cluster


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "suggest",
        help="Suggest HostAccessPolicies for what all nodes have observed.",
        description="Suggest HostAccessPolicies, as YAML to review, for the host processes whose "
        "traffic was dropped (in audit: would have been) on any node. Fails if a node's agent does "
        "not respond or has observed less than a day.",
    )
    observed.add_filters(parser)
    parser.add_argument(
        "--output", choices=("yaml", "json"), default="yaml", help="Output format (default: yaml)."
    )
    parser.add_argument(
        "--yes", action="store_true", help="Accept missing nodes and less than a day."
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if the observations do not suffice."""
    nodes = observed.collect(cluster)
    for node in nodes:
        printing.progress(node.sentence)
    problems = observed.problems(nodes)
    for problem in problems:
        printing.progress(f"kubectl podgate: {problem}")
    if problems and not arguments.yes:
        printing.progress("Wait, or use --yes: rare sources may be missing then.")
        return 1
    options = (f"--output={arguments.output}", *observed.filters(arguments))
    printing.line(observed.merged(cluster, nodes, *options).rstrip("\n"))
    if arguments.output == "yaml":
        pods = cluster.items("pods", "--all-namespaces")
        chosen = arguments.namespace
        found = uncarried.sentences(
            pod for pod in pods if not chosen or pod["metadata"]["namespace"] in chosen
        )
        if found:
            printing.line("# No policy can carry over:")
        for sentence in found:
            printing.line(f"# - {sentence}")
    return 0

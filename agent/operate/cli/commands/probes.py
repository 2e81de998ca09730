"""`podgate probes`."""

import pathlib

import click

from agent.operate.cli.commands import options


@click.command(short_help="Show all probes of all pods, podgate's and the kubelet's.")
@options.output
@options.namespace
@options.pod
@options.sort
@options.run_directory
def probes(
    output: options.Format, namespace: str, pod: str, sort: str, run_directory: pathlib.Path
) -> None:
    """Show the results of podgate's probes and, for pods in strict, of the kubelet's, which the
    relay proxies.

    The kubelet's appear as connections: probes and hooks that share a port share a line. JSON and
    YAML have pods with their probes, and --sort does not change their order.
    """
    from agent.admin.report import AgentReport
    from agent.operate.cli import answers
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import probes as view

    report = answers.read(run_directory, "/status", AgentReport)
    chosen = options.PodFilter(namespace, pod)
    pods = [one for one in report.pods if chosen.matches(one.namespace, one.name)]
    rows = screens.sort(view.rows(pods), view.PROBES, sort)
    screens.write(view.documents(pods), output, lambda screen: view.show(screen, report, rows))

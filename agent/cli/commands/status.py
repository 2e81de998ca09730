"""`podgate status`."""

import pathlib

import click

from agent.cli.commands import options


@click.command()
@options.output
@options.namespace
@options.pod
@options.sort
@options.run_directory
def status(
    output: options.Format, namespace: str, pod: str, sort: str, run_directory: pathlib.Path
) -> None:
    """Show the agent's state and all pods."""
    import msgspec

    from agent.admin.report import AgentReport
    from agent.cli import answers
    from agent.cli import output as screens
    from agent.cli.views import status as view

    report = answers.read(run_directory, "/status", AgentReport)
    chosen = options.PodFilter(namespace, pod)
    pods = [one for one in report.pods if chosen.matches(one.namespace, one.name)]
    report = msgspec.structs.replace(report, pods=screens.sort(pods, view.PODS, sort))
    screens.write(report, output, lambda screen: view.show(screen, report))

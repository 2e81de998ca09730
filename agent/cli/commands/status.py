"""`podgate status`."""

import pathlib

import click

from agent.cli.commands import options


@click.command()
@options.output
@options.run_directory
def status(output: options.Format, run_directory: pathlib.Path) -> None:
    """Show the agent's state and all pods."""
    from agent.admin.report import AgentReport
    from agent.cli import answers
    from agent.cli import output as screens
    from agent.cli.views import status as status_view

    report = answers.read(run_directory, "/status", AgentReport)
    screens.write(report, output, lambda _: status_view.show(report))

"""`podgate rules`."""

import pathlib

import click

from agent.cli.commands import options


@click.command(short_help="Show the rules in force, their pods and their hits.")
@options.output
@options.run_directory
def rules(output: options.Format, run_directory: pathlib.Path) -> None:
    """Show each rule of each policy in force: its pods, hits and problems."""
    from agent.admin.report import RulesReport
    from agent.cli import answers
    from agent.cli import output as screens
    from agent.cli.views import status as status_view

    found = answers.read(run_directory, "/rules", RulesReport)
    screens.write(found, output, lambda _: status_view.show_rules(found))

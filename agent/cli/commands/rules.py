"""`podgate rules`."""

import pathlib

import click

from agent.cli.commands import options


@click.command(short_help="Show the rules in force, their pods and their hits.")
@options.output
@options.run_directory
def rules(output: str, run_directory: pathlib.Path) -> None:
    """Show each rule of each policy in force: its pods, hits and problems."""
    content = options.fetch_from_agent(run_directory, "/rules")
    if output == "json":
        click.echo(content)
    else:
        from agent.cli.views import status as status_view

        status_view.show_rules(content)

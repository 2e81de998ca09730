"""The command lines of `podgate status` and `podgate drops`."""

import asyncio
import contextlib
import pathlib

import click

from agent.cli.commands import options
from agent.settings import admin_socket


@click.command()
@options.output
@options.run_directory
def status(output: str, run_directory: pathlib.Path) -> None:
    """Show what the running agent knows about every pod."""
    from agent.cli.views import status as status_view

    content = options.ask_agent(run_directory, "/status")
    if output == "json":
        click.echo(content)
    else:
        status_view.show(content)


@click.command(short_help="Show who of the node is refused, or would be.")
@options.output
@click.option("--follow", is_flag=True, help="Show refusals as they happen instead: a sample.")
@options.run_directory
def drops(output: str, follow: bool, run_directory: pathlib.Path) -> None:
    """Show who of the node is refused by a gate, or in audit would be: who would need a rule.

    One line for each sender, pod, protocol and port, the busiest first. With --follow one line for
    each refusal, until interrupted; the kernel tells no more than 160 a second of each CPU.
    """
    from agent.admin import client as admin_client
    from agent.cli.views import drops_follow
    from agent.cli.views import status as status_view

    if follow:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(
                    drops_follow.follow(admin_socket(run_directory), as_json=output == "json")
                )
        except admin_client.Unreachable as error:
            options.fail(error)
        return
    content = options.ask_agent(run_directory, "/drops")
    if output == "json":
        click.echo(content)
    else:
        status_view.show_drops(content)

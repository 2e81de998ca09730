"""`podgate status` and `podgate drops`."""

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
    """Show the agent's state and all pods."""
    from agent.cli.views import status as status_view

    content = options.fetch_from_agent(run_directory, "/status")
    if output == "json":
        click.echo(content)
    else:
        status_view.show(content)


@click.command(
    short_help="List host processes whose traffic is dropped (in audit: would be dropped)."
)
@options.output
@click.option("--follow", is_flag=True, help="Stream drop events (sampled).")
@options.run_directory
def drops(output: str, follow: bool, run_directory: pathlib.Path) -> None:
    """List host processes whose traffic is dropped (in audit: would be dropped).

    One line per source, pod, protocol and port, the busiest first. Then the containers that create
    raw or packet sockets of the host without a policy. With --follow one line per drop
    event, until interrupted; the kernel limits events to 160 per second and CPU.
    """
    from agent.cli.views import drops_follow
    from agent.cli.views import status as status_view

    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(drops_follow.follow(admin_socket(run_directory), as_json=output == "json"))
        return
    content = options.fetch_from_agent(run_directory, "/drops")
    if output == "json":
        click.echo(content)
    else:
        status_view.show_drops(content)

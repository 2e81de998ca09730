"""`podgate drops`."""

import asyncio
import contextlib
import pathlib

import click

from agent.cli.commands import options
from agent.settings import admin_socket


@click.command(
    short_help="List host processes whose traffic is dropped (in audit: would be dropped)."
)
@options.output
@click.option("--follow", is_flag=True, help="Stream drop events (sampled).")
@options.run_directory
def drops(output: options.Format, follow: bool, run_directory: pathlib.Path) -> None:
    """List host processes whose traffic is dropped (in audit: would be dropped).

    One line per source, pod, protocol and port, the busiest first. Then the containers that create
    raw or packet sockets of the host without a policy. With --follow one line per drop
    event, until interrupted; the kernel limits events to 160 per second and CPU.
    """
    from agent.admin.report import Drops
    from agent.cli import answers
    from agent.cli import output as screens
    from agent.cli.views import drops_follow
    from agent.cli.views import status as status_view

    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(drops_follow.follow(admin_socket(run_directory), output))
        return
    found = answers.read(run_directory, "/drops", Drops)
    screens.write(found, output, lambda _: status_view.show_drops(found))

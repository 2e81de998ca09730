"""The command lines of `podgate probes` and `podgate relay`."""

import asyncio
import pathlib

import click

from agent.cli.commands import options
from agent.settings import admin_socket

# A relay's start waits for the kernel and for RCU, a few times.
_RESTART_SECONDS = 90


@click.command(short_help="Show every probe of every pod, the kubelet's and podgate's own.")
@options.output
@options.run_directory
def probes(output: str, run_directory: pathlib.Path) -> None:
    """Show what came of every pod's probes: podgate's own, and of the kubelet's those that the
    relay carries, which are the ones of pods in strict.

    The kubelet's are seen as connections: a port that several probes or hooks share is one line.
    """
    from agent.cli.views import probes as probes_view

    content = options.ask_agent(run_directory, "/status")
    if output == "json":
        click.echo(probes_view.as_json(content))
    else:
        probes_view.show(content)


@click.group()
def relay() -> None:
    """The relay, which carries the kubelet's connections to pods in strict."""


@relay.command(short_help="Have a new relay take over.")
@options.run_directory
def restart(run_directory: pathlib.Path) -> None:
    """Start another relay, let it take over, and wait until it has.

    No connection is refused or cut by it: the old one carries on what it began.
    """
    from agent.admin import client as admin_client

    try:
        asyncio.run(
            admin_client.post(
                admin_socket(run_directory), "/relay/restart", timeout_seconds=_RESTART_SECONDS
            )
        )
    except admin_client.Unreachable as error:
        options.fail(error)
    click.echo("Another relay has taken over.")

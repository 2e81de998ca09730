"""`podgate probes` and `podgate relay`."""

import asyncio
import pathlib

import click

from agent.cli.commands import options
from agent.settings import admin_socket

# A relay's start waits for the kernel and for RCU, a few times.
_RESTART_SECONDS = 90


@click.command(short_help="Show all probes of all pods, podgate's and the kubelet's.")
@options.output
@options.run_directory
def probes(output: options.Format, run_directory: pathlib.Path) -> None:
    """Show the results of podgate's probes and, for pods in strict, of the kubelet's, which the
    relay proxies.

    The kubelet's appear as connections: probes and hooks that share a port share a line.
    """
    from agent.admin.report import AgentReport
    from agent.cli import answers
    from agent.cli import output as screens
    from agent.cli.views import probes as probes_view

    report = answers.read(run_directory, "/status", AgentReport)
    screens.write(probes_view.rows(report), output, lambda _: probes_view.show(report))


@click.group(short_help="Manage the relay of mode strict.")
def relay() -> None:
    """Manage the relay, which proxies the kubelet's connections to pods in strict."""


@relay.command(short_help="Replace the relay without interruption.")
@options.run_directory
def restart(run_directory: pathlib.Path) -> None:
    """Start a new relay, move new connections to it, and stop the old one.

    No connection is refused or cut: the old relay proxies its connections until they close.
    """
    from agent.admin import client as admin_client

    asyncio.run(
        admin_client.post(
            admin_socket(run_directory), "/relay/restart", timeout_seconds=_RESTART_SECONDS
        )
    )
    click.echo("A new relay has taken over.")

"""`podgate relay`."""

import asyncio
import pathlib

import click

from agent.operate.cli.commands import options
from agent.settings import admin_socket

# A relay's start waits for the kernel and for RCU, a few times.
_RESTART_SECONDS = 90


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

    async def request() -> None:
        socket = admin_socket(run_directory)
        await admin_client.fetch_version(socket)  # an agent that hangs is found soon
        await admin_client.post(socket, "/relay/restart", timeout_seconds=_RESTART_SECONDS)

    asyncio.run(request())
    click.echo("A new relay has taken over.")

"""`podgate metrics`."""

import asyncio
import pathlib

import click

from agent.errors import AgentUnreachableError
from agent.operate.cli.commands import options


@click.command(short_help="Print metrics, also without an agent.")
@options.run_directory
@options.bpffs
def metrics(run_directory: pathlib.Path, bpffs: pathlib.Path) -> None:
    """Print the agent's metrics in the text format of Prometheus.

    Without an agent: what the pinned maps count, for the textfile collector of node-exporter.
    """
    from agent.admin import client
    from agent.operate.cli import answers
    from agent.operate.pinned import metrics as pinned_metrics
    from agent.settings import admin_socket
    from bpf import pins

    try:
        content = asyncio.run(client.fetch(admin_socket(run_directory), "/metrics"))
    except AgentUnreachableError as error:
        content = answers.read_pins(
            error, lambda: pinned_metrics.exposition(pins.Pins(bpffs), run_directory)
        )
    click.echo(content, nl=False)

"""`python -m agent.relay --control FD`: started by the agent, never by hand."""

import sys

import click

from agent import logs
from agent.relay.process import Relay, end_of


@click.command()
@click.option("--control", type=int, required=True, help="Descriptor of a socket to the agent.")
@click.option(
    "--log-format",
    type=click.Choice([choice.value for choice in logs.LogFormat]),
    default=logs.LogFormat.JSON.value,
)
def main(control: int, log_format: str) -> None:
    """Carry the kubelet's connections into pods' namespaces, as the agent says."""
    logs.configure(logs.LogFormat(log_format))
    sys.exit(Relay(end_of(control)).run())


main()

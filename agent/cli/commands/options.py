"""Options that several commands share, and their requests to the agent."""

import asyncio
import pathlib
from collections.abc import Callable
from typing import TypeVar

import click

from agent.logs import LogFormat
from agent.settings import (
    DEFAULT_RELAY_RANGES,
    RUN_DIRECTORY,
    admin_socket,
    parse_range4,
    parse_range6,
)
from bpf import pins

T = TypeVar("T")

PATH = click.Path(path_type=pathlib.Path)


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """An option's callback that converts by `parse`; its `ValueError` becomes a usage error."""

    def read(context: click.Context, option: click.Parameter, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


output = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
run_directory = click.option(
    "--run-directory",
    type=PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="Directory of the agent's sockets and state.",
)
bpffs = click.option(
    "--bpffs",
    type=PATH,
    default=pins.DEFAULT_BPFFS,
    show_default=True,
    help="BPF file system for pinned objects.",
)
log_format = click.option(
    "--log-format",
    type=click.Choice([choice.value for choice in LogFormat]),
    default=LogFormat.JSON.value,
    show_default=True,
    help="Log format.",
)
relay_range4 = click.option(
    "--relay-range4",
    metavar="NETWORK",
    callback=parsed(parse_range4),
    default=str(DEFAULT_RELAY_RANGES.ipv4),
    show_default=True,
    help="IPv4 range for the relay (mode strict); must not be routed by this node.",
)
relay_range6 = click.option(
    "--relay-range6",
    metavar="NETWORK",
    callback=parsed(parse_range6),
    default=str(DEFAULT_RELAY_RANGES.ipv6),
    show_default=True,
    help="IPv6 range for the relay.",
)


def fetch_from_agent(directory: pathlib.Path, resource: str) -> bytes:
    """The response of the agent whose sockets are in `directory`.

    Raises `AgentUnreachableError`.
    """
    from agent.admin import client as admin_client

    return asyncio.run(admin_client.fetch(admin_socket(directory), resource))

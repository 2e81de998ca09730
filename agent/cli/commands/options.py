"""What several commands share: their options, and how they end when they cannot do it."""

import asyncio
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

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
    """An option's callback: what `parse` makes of it; its `ValueError` becomes click's."""

    def read(context: click.Context, option: click.Parameter, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


output = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True
)
run_directory = click.option(
    "--run-directory",
    type=PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="Where the agent's sockets are.",
)
bpffs = click.option(
    "--bpffs",
    type=PATH,
    default=pins.DEFAULT_BPFFS,
    show_default=True,
    help="The BPF file system to pin below.",
)
log_format = click.option(
    "--log-format",
    type=click.Choice([choice.value for choice in LogFormat]),
    default=LogFormat.JSON.value,
    show_default=True,
)
relay_range4 = click.option(
    "--relay-range4",
    metavar="NETWORK",
    callback=parsed(parse_range4),
    default=str(DEFAULT_RELAY_RANGES.ipv4),
    show_default=True,
    help="Addresses that are the relay's, for mode strict: a network that the node routes nowhere.",
)
relay_range6 = click.option(
    "--relay-range6",
    metavar="NETWORK",
    callback=parsed(parse_range6),
    default=str(DEFAULT_RELAY_RANGES.ipv6),
    show_default=True,
    help="The same for IPv6.",
)


def ask_agent(directory: pathlib.Path, resource: str) -> bytes:
    """What the agent whose sockets are there answers; or end, saying that none does."""
    from agent.admin import client as admin_client

    try:
        return asyncio.run(admin_client.fetch(admin_socket(directory), resource))
    except admin_client.Unreachable as error:
        fail(error)


def fail(problem: object) -> NoReturn:
    """One sentence on stderr, and exit status 1."""
    click.echo(f"podgate: {problem}", err=True)
    sys.exit(1)

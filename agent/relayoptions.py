"""The options that say which addresses are the relay's."""

from collections.abc import Callable
from typing import TypeVar

import click

from agent.relayranges import DEFAULT, parse_range4, parse_range6

T = TypeVar("T")


def _read(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    def read(context: click.Context, option: click.Parameter, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


range4 = click.option(
    "--relay-range4",
    metavar="NETWORK",
    callback=_read(parse_range4),
    default=str(DEFAULT.ipv4),
    show_default=True,
    help="Addresses that are the relay's, for mode strict: a network that the node routes nowhere.",
)
range6 = click.option(
    "--relay-range6",
    metavar="NETWORK",
    callback=_read(parse_range6),
    default=str(DEFAULT.ipv6),
    show_default=True,
    help="The same for IPv6.",
)

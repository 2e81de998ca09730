"""Options for records of flows of `podgate run`."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import click

from agent.operate.cli.commands import options
from agent.settings import FlowSettings

_OPTIONS = (
    click.option(
        "--flows-file",
        metavar="FILE",
        type=options.PATH,
        help="Append records of dropped and admitted flows to this file, a JSON document each "
        "line. Default: none.",
    ),
    click.option(
        "--flows-file-mib",
        metavar="MIB",
        type=click.IntRange(1, 1 << 20),
        default=100,
        show_default=True,
        help="Size at which the file is renamed to FILE.1, and a new one starts.",
    ),
    click.option(
        "--flows-file-count",
        metavar="FILES",
        type=click.IntRange(1, 1000),
        default=5,
        show_default=True,
        help="Files that are kept, with the current one.",
    ),
    click.option(
        "--flows-interval",
        metavar="SECONDS",
        type=click.FloatRange(1, 3600),
        default=10.0,
        show_default=True,
        help="Time between records of one flow.",
    ),
)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of records of flows; the command gets them as `flows`."""

    @functools.wraps(command)
    def wrapped(
        *,
        flows_file: pathlib.Path | None,
        flows_file_mib: int,
        flows_file_count: int,
        flows_interval: float,
        **others: Any,
    ) -> None:
        flows = None
        if flows_file:
            flows = FlowSettings(
                path=flows_file,
                max_bytes=flows_file_mib << 20,
                files=flows_file_count,
                interval_seconds=flows_interval,
            )
        command(flows=flows, **others)

    decorated: Callable[..., None] = wrapped
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated

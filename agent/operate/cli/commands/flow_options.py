"""Options for records of flows of `podgate run`."""

import functools
import importlib.util
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import Any

import click

from agent.operate.cli.commands import options
from agent.settings import FlowFileSettings, FlowOtlpSettings, FlowSettings

_STANDARD_OUTPUT = pathlib.Path("-")
# Where receivers of the specification have logs.
_PATH = "/v1/logs"


def _receiver(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """With the path of logs, unless it has one."""
    if value is None:
        return None
    try:
        url = urllib.parse.urlsplit(value)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise click.BadParameter("it must be a URL with http or https")
    # Imported when the first records are sent, after the first gates.
    if importlib.util.find_spec("opentelemetry") is None:
        raise click.BadParameter("it needs the package opentelemetry-proto (podgate[otlp])")
    return value if url.path.strip("/") else urllib.parse.urlunsplit(url._replace(path=_PATH))


_OPTIONS = (
    click.option(
        "--flows-file",
        metavar="FILE",
        type=options.PATH,
        help="Append records of dropped and admitted flows to this file, a JSON document each "
        "line; - is standard output. Default: none.",
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
        "--flows-otlp",
        metavar="URL",
        callback=_receiver,
        help="Send records of dropped and admitted flows to this OTLP receiver, over HTTP, such as "
        f"http://127.0.0.1:4318; without a path, to {_PATH}. Not with --flows-file. Default: none.",
    ),
    click.option(
        "--flows-otlp-headers",
        metavar="FILE",
        type=options.PATH,
        help="Headers for the receiver, a line 'Name: value' each, read for each request. "
        "Default: none.",
    ),
    click.option(
        "--flows-otlp-ca",
        metavar="FILE",
        type=options.PATH,
        help="Certificates (PEM) that verify the receiver's. Default: the system's.",
    ),
    click.option(
        "--flows-interval",
        metavar="SECONDS",
        type=click.FloatRange(1, 3600),
        default=10.0,
        show_default=True,
        help="Time between records of one flow.",
    ),
    click.option(
        "--flows-drops",
        metavar="NUMBER",
        type=click.IntRange(0, 10_000),
        default=0,
        show_default=True,
        help="Records of single drops each second, at most, with addresses and reason; the rest "
        "is counted.",
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
        flows_otlp: str | None,
        flows_otlp_headers: pathlib.Path | None,
        flows_otlp_ca: pathlib.Path | None,
        flows_interval: float,
        flows_drops: int,
        **others: Any,
    ) -> None:
        if flows_file and flows_otlp:
            raise click.UsageError("--flows-file and --flows-otlp exclude each other")
        if (flows_otlp_headers or flows_otlp_ca) and not flows_otlp:
            raise click.UsageError("--flows-otlp-headers and --flows-otlp-ca need --flows-otlp")
        if flows_drops and not (flows_file or flows_otlp):
            raise click.UsageError("--flows-drops needs --flows-file or --flows-otlp")
        output: FlowFileSettings | FlowOtlpSettings | None = None
        if flows_otlp:
            output = FlowOtlpSettings(
                url=flows_otlp, headers=flows_otlp_headers, authority=flows_otlp_ca
            )
        elif flows_file and flows_file != _STANDARD_OUTPUT:
            output = FlowFileSettings(
                path=flows_file, max_bytes=flows_file_mib << 20, files=flows_file_count
            )
        flows = None
        if flows_file or flows_otlp:
            flows = FlowSettings(
                output=output, interval_seconds=flows_interval, drops_per_second=flows_drops
            )
        command(flows=flows, **others)

    return options.added(_OPTIONS, wrapped)

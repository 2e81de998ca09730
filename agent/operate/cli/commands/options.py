"""Options that several commands share, and their requests to the agent."""

import dataclasses
import datetime
import enum
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.text import read_duration
from agent.settings import (
    DEFAULT_RELAY_RANGES,
    RUN_DIRECTORY,
    parse_range4,
    parse_range6,
)
from bpf import pins

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=pathlib.Path)


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """An option's callback that converts by `parse`; its `ValueError` becomes a usage error."""

    def read(context: click.Context, option: click.Parameter, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


class Format(enum.StrEnum):
    """Output format of a command."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_table(self) -> bool:
        return self in (Format.TABLE, Format.WIDE)


class _FormatChoice(click.Choice[str]):
    """`text` is what `table` was called."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Format:
        return Format(super().convert("table" if value == "text" else value, param, ctx))


def added(
    decorators: Sequence[Callable[..., Any]], command: Callable[..., None]
) -> Callable[..., None]:
    """The command with these options, in this order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def own_namespace(description: str) -> Callable[[F], F]:
    """Option --namespace of a process that runs in podgate's own namespace."""
    return click.option(
        "--namespace",
        envvar="POD_NAMESPACE",
        show_envvar=True,
        default="podgate",
        show_default=True,
        help=description,
    )


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; IPv6 in brackets. Raises `ValueError`."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"{text!r} is not HOST:PORT; examples are 127.0.0.1:9650, [::1]:9650 and :9650"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_optional_address(text: str | None) -> tuple[str, int] | None:
    """As `parse_address`; None if empty."""
    return parse_address(text) if text else None


@dataclasses.dataclass(frozen=True, slots=True)
class PodFilter:
    """The pods that --namespace and --pod choose; all if both are empty."""

    namespace: str
    pod: str

    def matches(self, namespace: str, name: str) -> bool:
        return self.namespace in ("", namespace) and self.pod in ("", name, f"{namespace}/{name}")

    def matches_full(self, full_name: str) -> bool:
        """As `matches`, for "namespace/name"."""
        namespace, _, name = full_name.rpartition("/")
        return self.matches(namespace, name)


output = click.option(
    "--output",
    "-o",
    type=_FormatChoice([form.value for form in Format]),
    default=Format.TABLE.value,
    show_default=True,
    help="Output format; wide has further columns, and times instead of ages.",
)
namespace = click.option("--namespace", "-n", default="", help="Only pods of this namespace.")
pod = click.option(
    "--pod", default="", metavar="[NAMESPACE/]NAME", help="Only the pods of this name."
)
since = click.option(
    "--since", default="", help="Only what was seen since: 90m, 24h, 7d, or a time of UTC."
)
sort = click.option(
    "--sort",
    default="",
    metavar="COLUMN",
    help="Sort by this column; numbers and times the largest first.",
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
kubeconfig = click.option(
    "--kubeconfig",
    metavar="FILE",
    help="kubeconfig file. Default: KUBECONFIG, or the pod's service account.",
)
log_format = click.option(
    "--log-format",
    type=click.Choice([choice.value for choice in LogFormat]),
    default=LogFormat.JSON.value,
    show_default=True,
    help="Log format.",
)
log_level = click.option(
    "--log-level",
    type=click.Choice([choice.value for choice in LogLevel]),
    default=LogLevel.INFO.value,
    show_default=True,
    help="Log lines of this level and above.",
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


def parse_since(text: str, now: datetime.datetime) -> datetime.datetime | None:
    """The time that --since names; None for an empty text. Raises `click.BadParameter`."""
    if not text:
        return None
    if age := read_duration(text):
        return now - age
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is neither a duration such as 24h nor a time such as 2026-01-31T08:00",
            param_hint="--since",
        ) from error
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)

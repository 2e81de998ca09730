"""`podgate off --node` and `podgate on --node`."""

import asyncio
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agent.operate.cli.commands import options

if TYPE_CHECKING:
    from agent.admin.report import AgentReport

Command = TypeVar("Command", bound=Callable[..., Any])

_CLUSTER = (
    "use --node, for this node. For the whole cluster run 'kubectl podgate {word}', which sets or "
    "removes the label podgate.io/max-mode=off of podgate's namespace"
)
# An agent with 100 gates takes about as long (make bench BENCH=off); what is left is detached here.
_AGENT_SECONDS = 5
# For one report: it waits for a pass over the gates.
_LEAST_SECONDS = 1
_POLL_SECONDS = 0.05


def _timeout(text: str) -> Callable[[Command], Command]:
    return click.option(
        "--timeout",
        "agent_seconds",
        metavar="SECONDS",
        type=click.IntRange(0, 3600),
        default=_AGENT_SECONDS,
        show_default=True,
        help=text,
    )


_node = click.option("--node", "is_for_node", is_flag=True, help="This node, without API server.")


@click.command(short_help="Open all gates of this node, now.")
@_node
@options.run_directory
@options.bpffs
@_timeout("How long the agent may take; then this command detaches what is left.")
def off(
    is_for_node: bool, run_directory: pathlib.Path, bpffs: pathlib.Path, agent_seconds: int
) -> None:
    """Open all gates of this node: no gate, hook, relay or default-deny table is left.

    It needs neither the API server nor the agent, and lasts until 'podgate on --node' or a reboot,
    also over restarts of the agent.
    """
    from agent.app import preflight, removal
    from agent.pods import off_file
    from bpf import cleanup, pins

    if not is_for_node:
        raise click.UsageError(_CLUSTER.format(word="off"))
    preflight.check()
    run_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    off_file.path(run_directory).touch(mode=0o644)
    installation = pins.Pins(bpffs)
    by = "the agent"
    if not _has_agent_done(run_directory, agent_seconds) or cleanup.remains(installation):
        removal.detach(run_directory, installation)
        by = "this command"
    click.echo(f"podgate is off on this node; detached by {by}. Back: podgate on --node")


@click.command(short_help="Undo 'podgate off --node'.")
@_node
@options.run_directory
@_timeout("How long to wait until the agent follows.")
def on(is_for_node: bool, run_directory: pathlib.Path, agent_seconds: int) -> None:
    """Undo 'podgate off --node': labels and options decide again."""
    from agent.pods import off_file

    if not is_for_node:
        raise click.UsageError(_CLUSTER.format(word="on"))
    off_file.path(run_directory).unlink(missing_ok=True)
    deadline = time.monotonic() + agent_seconds
    while (report := _report(run_directory, deadline)) is not None and (
        "--node" in report.max_mode_from
    ):
        if time.monotonic() > deadline:
            click.echo("The agent does not follow yet; see 'podgate status'.")
            return
        time.sleep(_POLL_SECONDS)
    if report is None:
        click.echo("No agent responds: gates are attached again when one runs.")
    else:
        click.echo(f"Modes up to {report.max_mode}, by {report.max_mode_from}.")


def _has_agent_done(run_directory: pathlib.Path, seconds: int) -> bool:
    """Whether an agent responds and has nothing in force any more, in time."""
    deadline = time.monotonic() + seconds
    while (report := _report(run_directory, deadline)) is not None:
        if report.max_mode == "off" and not report.in_force:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return False


def _report(run_directory: pathlib.Path, deadline: float) -> "AgentReport | None":
    """Of the agent; None if none responds in time. deadline: of CLOCK_MONOTONIC."""
    from agent.admin import client as admin_client
    from agent.admin import decoding
    from agent.admin.report import AgentReport as Report
    from agent.errors import AgentRequestError
    from agent.settings import admin_socket

    seconds = max(deadline - time.monotonic(), _LEAST_SECONDS)
    try:
        content = asyncio.run(
            admin_client.fetch(admin_socket(run_directory), "/status", timeout_seconds=seconds)
        )
    except AgentRequestError:
        return None
    return decoding.decode(content, Report)

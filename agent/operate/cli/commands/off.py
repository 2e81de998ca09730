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
    from bpf.pins import Pins

Command = TypeVar("Command", bound=Callable[..., Any])

_CLUSTER = (
    "use --node, for this node. For the whole cluster run 'kubectl podgate {word}', which sets or "
    "removes the label podgate.io/max-mode=off of podgate's namespace"
)
# An agent with 100 gates takes about as long to detach them (make bench BENCH=off).
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
@_timeout("How long to wait until the agent follows; gates are open before.")
def off(
    is_for_node: bool, run_directory: pathlib.Path, bpffs: pathlib.Path, agent_seconds: int
) -> None:
    """Open all gates of this node: no gate, hook, relay or default-deny table is left.

    It needs neither the API server nor the agent, nor room in the run directory, and lasts until
    'podgate on --node' or a reboot, also over restarts of the agent.
    """
    from agent.app import preflight, removal
    from bpf import cleanup, pins

    if not is_for_node:
        raise click.UsageError(_CLUSTER.format(word="off"))
    preflight.check_rights()
    installation = pins.Pins(bpffs)
    # An agent would open the gates more slowly, and may hang; so it only follows.
    progress = removal.open_gates(installation)
    removal.keep_off(run_directory, installation, progress)
    report = _follower(run_directory, installation, agent_seconds)
    if not _is_done(report) or cleanup.remains(installation):
        progress.problems += removal.detach(run_directory, installation).problems
    progress.check()
    if report is not None and report.max_mode != "off":
        raise removal.IncompleteError(
            f"all gates are open, but the agent (version {report.version}, pid {report.pid}) does "
            "not follow, and attaches them again; stop it."
        )
    follower = "its agent follows" if _is_done(report) else "no agent has responded"
    click.echo(f"podgate is off on this node; {follower}. Back: podgate on --node")


@click.command(short_help="Undo 'podgate off --node'.")
@_node
@options.run_directory
@options.bpffs
@_timeout("How long to wait until the agent follows.")
def on(
    is_for_node: bool, run_directory: pathlib.Path, bpffs: pathlib.Path, agent_seconds: int
) -> None:
    """Undo 'podgate off --node': labels and options decide again."""
    from agent.pods import off_marks
    from bpf import pins

    if not is_for_node:
        raise click.UsageError(_CLUSTER.format(word="on"))
    off_marks.remove(run_directory, pins.Pins(bpffs))
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


def _is_done(report: "AgentReport | None") -> bool:
    return report is not None and report.max_mode == "off" and not report.in_force


def _follower(
    run_directory: pathlib.Path, installation: "Pins", seconds: int
) -> "AgentReport | None":
    """The report of an agent that has nothing in force any more; after this time its last one. None
    if there is no agent, or it does not respond."""
    from agent.app import removal

    deadline = time.monotonic() + seconds
    while not _is_done(report := _report(run_directory, deadline)):
        if time.monotonic() > deadline:
            break
        # One that starts does not respond yet.
        if report is None and not removal.has_agent(run_directory, installation):
            break
        time.sleep(_POLL_SECONDS)
    return report


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

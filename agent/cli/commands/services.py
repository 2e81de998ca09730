"""`podgate services`, and what `podgate run` can be told about service endpoints."""

import contextlib
import ipaddress
import json
import pathlib
import sys
from typing import Any, Final

import click

from agent.cli.commands import options
from agent.settings import localnet_socket

# The agent answers at once, or it has not heard of all services yet.
_ANSWER_SECONDS: Final = 10.0


def _loopback(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if _is_loopback(host) and port.isdecimal() and int(port) < 1 << 16:
        return host, int(port)
    raise click.BadParameter(
        f"{text!r} is no address and port of the loopback; write for instance 127.0.0.1:9651"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


is_served = click.option(
    "--service-endpoints",
    is_flag=True,
    help="In a cluster: tell everybody on the node which endpoints of each service to use.",
)
address = click.option(
    "--localnet-address",
    metavar="HOST:PORT",
    callback=_loopback,
    help="Tell it on this port of the loopback, too.",
)


@click.command(short_help="Show which endpoints of each service this node uses.")
@options.output
@click.option("--watch", is_flag=True, help="Show each change, until interrupted.")
@click.option("--target", help="The server, as gRPC writes it; else the run directory's socket.")
@options.run_directory
def services(output: str, watch: bool, target: str | None, run_directory: pathlib.Path) -> None:
    """Show each service with the endpoints that connections from this node may go to.

    With --output json one line for each state, as protobuf's JSON has it.
    """
    from agent.client import base
    from agent.client import services as services_client

    where = target or f"unix://{localnet_socket(run_directory).absolute()}"
    follower = services_client.Client(
        where, on_problem=lambda problem: click.echo(problem, err=True)
    )
    with contextlib.closing(follower):
        if watch:
            with base.cancelled_by_signals(follower.cancel):
                for state in follower:
                    _show(state, output)
            return
        try:
            found = follower.ask(_ANSWER_SECONDS)
        except services_client.Broken as error:
            options.fail(f"{error}; the agent serves them if run with --service-endpoints")
        if found is None:
            options.fail("the agent has not heard of all services yet; see its log, or try again")
        _show(found, output)


def _show(state: Any, output: str) -> None:
    from agent.cli.views import services as services_view

    if output == "json":
        click.echo(json.dumps(services_view.as_json(state), separators=(",", ":")))
    else:
        services_view.show(state)
    sys.stdout.flush()

"""`podgate services`, and the options of `podgate run` for service endpoints."""

import contextlib
import ipaddress
import pathlib
from typing import Any

import click

from agent.cli.commands import options
from agent.settings import localnet_socket

# The agent responds at once, or it has not listed all services yet.
_ANSWER_SECONDS = 10.0


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
        f"{text!r} is not an address and port of the loopback; an example is 127.0.0.1:9651"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


is_served = click.option(
    "--service-endpoints",
    is_flag=True,
    help="Publish each service's endpoints to clients on this node (needs a cluster).",
)
address = click.option(
    "--localnet-address",
    metavar="HOST:PORT",
    callback=_loopback,
    help="Also serve service endpoints on this loopback port.",
)


@click.command(short_help="Show this node's endpoints of each service.")
@options.output
@click.option("--watch", is_flag=True, help="Print again after each change, until interrupted.")
@click.option("--target", help="gRPC target. Default: socket in the run directory.")
@options.run_directory
def services(
    output: options.Format, watch: bool, target: str | None, run_directory: pathlib.Path
) -> None:
    """Show each service with the endpoints for connections from this node.

    With --output json one line per state, in protobuf's JSON form.
    """
    from agent.client import base
    from agent.client import services as services_client
    from agent.errors import PodgateError

    where = target or f"unix://{localnet_socket(run_directory).absolute()}"
    follower = services_client.ServicesClient(
        where, on_problem=lambda problem: click.echo(problem, err=True)
    )
    with contextlib.closing(follower):
        if watch:
            with base.cancelled_by_signals(follower.cancel):
                for state in follower:
                    _show(state, output)
            return
        try:
            found = follower.request(_ANSWER_SECONDS)
        except base.StreamError as error:
            raise PodgateError(
                f"{error}; the agent serves them if run with --service-endpoints"
            ) from error
        if found is None:
            raise PodgateError("the agent has not listed all services yet; see its log, or retry")
        _show(found, output)


def _show(state: Any, output: options.Format) -> None:
    from agent.cli import output as screens
    from agent.cli.views import services as services_view

    screens.write(services_view.as_json(state), output, lambda _: services_view.show(state))

"""`podgate services`."""

import contextlib
import pathlib

import click

from agent.operate.cli.commands import options
from agent.settings import localnet_socket

# The agent responds at once, or it has not listed all services yet.
_ANSWER_SECONDS = 5.0


@click.command(short_help="Show this node's endpoints of each service.")
@options.output
@click.option("--namespace", "-n", default="", help="Only services of this namespace.")
@click.option(
    "--type",
    "types",
    type=click.Choice(["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]),
    multiple=True,
    help="Only services of this type, may be repeated; ExternalName services only with it.",
)
@click.option(
    "--family",
    "families",
    type=click.Choice(["IPv4", "IPv6"]),
    multiple=True,
    help="Only addresses and endpoints of this family.",
)
@click.option(
    "--service-proxy-name",
    default="",
    metavar="NAME",
    help="Only services that this proxy is to serve, by their label; *: all. Default: those "
    "without the label.",
)
@click.option(
    "--labels",
    "label_patterns",
    multiple=True,
    metavar="KEY",
    help="Also show labels with this key, may be repeated; * matches any part of a key.",
)
@click.option(
    "--annotations",
    "annotation_patterns",
    multiple=True,
    metavar="KEY",
    help="The same for annotations.",
)
@click.option(
    "--all-endpoints", is_flag=True, help="Also show endpoints that this node does not use."
)
@click.option(
    "--endpoint-details",
    is_flag=True,
    help="Also show each endpoint's pod and node; JSON and YAML also have its zone, conditions and "
    "hints.",
)
@click.option(
    "--all",
    "is_everything",
    is_flag=True,
    help="Show everything that --services-from of 'podgate run' reads, of all services; JSON and "
    "YAML then have no revision.",
)
@click.option(
    "--node",
    default="",
    metavar="NAME",
    help="Endpoints as this node uses them; only at a server for other nodes.",
)
@options.sort
@click.option("--watch", is_flag=True, help="Print again after each change, until interrupted.")
@click.option("--target", help="gRPC target. Default: socket in the run directory.")
@options.run_directory
def services(
    output: options.Format,
    namespace: str,
    types: tuple[str, ...],
    families: tuple[str, ...],
    service_proxy_name: str,
    label_patterns: tuple[str, ...],
    annotation_patterns: tuple[str, ...],
    all_endpoints: bool,
    endpoint_details: bool,
    is_everything: bool,
    node: str,
    sort: str,
    watch: bool,
    target: str | None,
    run_directory: pathlib.Path,
) -> None:
    """Show each service with the endpoints for connections from this node.

    JSON and YAML have one document per state, in protobuf's JSON form, in the agent's order.
    """
    from agent.client import base
    from agent.errors import AgentUnreachableError, PodgateError
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import services as view
    from agent.services.api import decode
    from agent.services.client import services as services_client
    from agent.services.client.v1alpha1 import endpoints_pb2

    requested = endpoints_pb2.NextFilter(
        namespaces=[namespace] if namespace else [],
        types=[services_client.TYPES[one] for one in types],
        families=[services_client.FAMILIES[one] for one in families],
        service_proxy_name=service_proxy_name,
        label_patterns=label_patterns,
        annotation_patterns=annotation_patterns,
        all_endpoints=all_endpoints,
        endpoint_details=endpoint_details,
        node=node,
    )
    if is_everything:
        if any((types, families, service_proxy_name, label_patterns, annotation_patterns)):
            raise click.UsageError("--all has everything; leave out the other filters")
        requested.MergeFrom(decode.complete_filter())
    columns = view.columns(requested)

    def show(state: services_client.ServicesState) -> None:
        rows = screens.sort(view.rows(state.services), columns, sort)
        screens.write(
            view.document(state, has_position=not is_everything),
            output,
            lambda screen: view.show(screen, state, columns, rows),
        )

    where = target or f"unix://{localnet_socket(run_directory).absolute()}"
    unreachable = (
        f"no agent serves service endpoints at {where}; is 'podgate run --service-endpoints' "
        "running?"
    )
    follower = services_client.ServicesClient(
        where, filter=requested, on_problem=lambda problem: click.echo(problem, err=True)
    )
    with contextlib.closing(follower):
        if watch:
            with base.cancelled_by_signals(follower.cancel):
                for state in follower:
                    show(state)
            return
        try:
            show(follower.once(_ANSWER_SECONDS))
        except base.StreamError as error:
            if error.code is services_client.DEADLINE_EXCEEDED and follower.is_connected():
                raise PodgateError(
                    "the agent has not listed all services yet; see its log, or retry"
                ) from error
            if error.code in (services_client.UNAVAILABLE, services_client.DEADLINE_EXCEEDED):
                raise AgentUnreachableError(unreachable) from error
            if error.code in services_client.REJECTED:
                raise PodgateError(str(error)) from error
            raise PodgateError(f"{error}; see the agent's log.") from error

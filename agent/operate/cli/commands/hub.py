"""`podgate hub`."""

import asyncio
import pathlib

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.cli.commands import options, service_options
from agent.settings import ServiceSettings


@click.command(short_help="Serve services to the agents of many nodes.")
@options.kubeconfig
@service_options.hub_options
@click.option(
    "--http-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_address),
    default=":9654",
    show_default=True,
    help="Address of /metrics, /healthz and /readyz; without a host, all addresses.",
)
@options.run_directory
@options.log_format
@options.log_level
def hub(
    kubeconfig: str | None,
    service_endpoints: ServiceSettings,
    http_address: tuple[str, int],
    run_directory: pathlib.Path,
    log_format: str,
    log_level: str,
) -> None:
    """Read the cluster's services once, and serve them to 'podgate run --services-from' on many
    nodes, over mutual TLS.

    Several replicas are independent of each other: agents use any of them.
    """
    from agent import logs
    from agent.services.hub import hub as replica

    settings = replica.HubSettings(
        services=service_endpoints,
        kubeconfig=kubeconfig,
        http_host=http_address[0],
        http_port=http_address[1],
        run_directory=run_directory,
        log_format=LogFormat(log_format),
    )
    logs.configure(settings.log_format, LogLevel(log_level))
    asyncio.run(replica.run(settings))

"""`podgate controller`."""

import asyncio
import os
import pathlib
import uuid

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.cli.commands import options


@click.command(short_help="Run the controller of a cluster.")
@options.kubeconfig
@options.own_namespace("Namespace of the Lease and of podgate's own objects.")
@click.option(
    "--http-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_address),
    default=":9651",
    show_default=True,
    help="Address of /metrics, /healthz and /readyz; without a host, all addresses.",
)
@click.option(
    "--webhook-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_address),
    default=":9443",
    show_default=True,
    help="Address of the admission webhook; without a host, all addresses.",
)
@click.option(
    "--webhook-tls",
    type=options.PATH,
    metavar="DIR",
    help="Directory with tls.crt and tls.key of the webhook, which are read again when they "
    "change. Without it, or while it has no certificate, the webhook is not served.",
)
@click.option(
    "--webhook-client-ca",
    type=options.PATH,
    metavar="FILE",
    help="Authorities (PEM) of the API servers' client certificates. Clients without one are "
    "rejected then.",
)
@click.option(
    "--webhook-client-name",
    multiple=True,
    metavar="NAME",
    help="A common name that clients may have; may be repeated. Without it, every certificate of "
    "--webhook-client-ca.",
)
@options.log_format
@options.log_level
def controller(
    kubeconfig: str | None,
    namespace: str,
    http_address: tuple[str, int],
    webhook_address: tuple[str, int],
    webhook_tls: pathlib.Path | None,
    webhook_client_ca: pathlib.Path | None,
    webhook_client_name: tuple[str, ...],
    log_format: str,
    log_level: str,
) -> None:
    """Run one replica of the controller, which does what one process does for the whole cluster.

    Replicas elect a leader by a Lease; the others wait.
    """
    from agent import logs
    from agent.controller import controller as replica
    from agent.controller.settings import ControllerSettings, WebhookSettings

    if webhook_client_name and not webhook_client_ca:
        raise click.UsageError("--webhook-client-name needs --webhook-client-ca")
    settings = ControllerSettings(
        kubeconfig=kubeconfig,
        namespace=namespace,
        # As client-go's programs: the host's name is the pod's.
        identity=f"{os.uname().nodename}_{uuid.uuid4()}",
        http_host=http_address[0],
        http_port=http_address[1],
        webhook=WebhookSettings(
            host=webhook_address[0],
            port=webhook_address[1],
            directory=webhook_tls,
            client_ca=webhook_client_ca,
            client_names=webhook_client_name,
        ),
        log_format=LogFormat(log_format),
    )
    logs.configure(settings.log_format, LogLevel(log_level))
    asyncio.run(replica.run(settings))

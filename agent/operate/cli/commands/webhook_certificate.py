"""`podgate webhook-certificate`."""

import asyncio

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.cli.commands import options


@click.command("webhook-certificate", short_help="Install the webhook's certificate, once.")
@options.kubeconfig
@options.own_namespace("Namespace of the controller's service and of the Secret.")
@click.option(
    "--configuration",
    "configurations",
    multiple=True,
    metavar="KIND/NAME",
    help="A webhook configuration of the chart that is to trust the certificate; may be repeated.",
)
@options.log_format
@options.log_level
def webhook_certificate(
    kubeconfig: str | None,
    namespace: str,
    configurations: tuple[str, ...],
    log_format: str,
    log_level: str,
) -> None:
    """Make the certificate of the controller's webhooks, and have the API server trust it.

    A Job of the installation runs it. It keeps a certificate that is valid and not older than a
    year, deletes what controllers of previous versions wrote, and deletes its own bindings last.
    """
    from agent import logs
    from agent.controller import webhook_certificate as installation

    unknown = set(configurations) - installation.CONFIGURATIONS.keys()
    if unknown:
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(installation.CONFIGURATIONS)}"
        )
    logs.configure(LogFormat(log_format), LogLevel(log_level))
    asyncio.run(installation.run(kubeconfig, namespace, configurations))

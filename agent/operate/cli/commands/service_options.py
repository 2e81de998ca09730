"""Options for service endpoints of `podgate run` and `podgate hub`."""

import functools
import ipaddress
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import click

from agent.operate.cli.commands import options
from agent.settings import ServiceSettings, TlsPaths

F = TypeVar("F", bound=Callable[..., Any])
Source = pathlib.Path | tuple[str, ...] | None
"""A path, or servers as HOST:PORT."""

_NEEDS_TLS = (
    "hubs and their clients need --services-tls-ca, --services-tls-cert and --services-tls-key"
)


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


def _parse_source(text: str | None) -> Source:
    """A path has a slash. Raises `ValueError`."""
    if not text:
        return None
    if "/" in text:
        return pathlib.Path(text)
    targets = tuple(part.strip() for part in text.split(","))
    for target in targets:
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{target!r} is neither a path with a slash (./services.yaml) nor HOST:PORT"
            )
    return targets


def _parse_listen(text: str | None) -> tuple[str, int] | None:
    return options.parse_address(text) if text else None


def tls_options(function: F) -> F:
    """The three files of mutual TLS."""
    for name, what in (
        ("key", "Private key of --services-tls-cert (PEM)."),
        ("cert", "Own certificate chain for it (PEM), for a server and a client."),
        (
            "ca",
            "Authority (PEM) of the other side's certificate, for --services-from HOST:PORT and "
            "--services-listen. All three files may be renewed.",
        ),
    ):
        function = click.option(f"--services-tls-{name}", type=options.PATH, help=what)(function)
    return function


_SERVED = click.option(
    "--service-endpoints",
    is_flag=True,
    help="Publish each service's endpoints to clients on this node, from the API server unless "
    "--services-from is given.",
)
_SOURCE = click.option(
    "--services-from",
    metavar="PATH|HOST:PORT,...",
    callback=options.parsed(_parse_source),
    help="Read services from this file or directory (what 'podgate services --all -o yaml' and "
    "'kubectl get services,endpointslices -A -o yaml' write; watched for changes), or from the "
    "first of these hubs that responds. Default: the API server.",
)
_NODE = click.option(
    "--services-node",
    metavar="NAME",
    help="With --manifests: this node's name in endpoints. Default: the host's name.",
)
_ZONE = click.option(
    "--services-zone",
    metavar="ZONE",
    help="With --manifests: this node's zone, which hints of endpoints name.",
)
_LISTEN = click.option(
    "--services-listen",
    metavar="HOST:PORT",
    callback=options.parsed(_parse_listen),
    help="Also serve other nodes at this address, with the endpoints as any of them uses them, to "
    "clients with a certificate of --services-tls-ca.",
)
_HUB_LISTEN = click.option(
    "--services-listen",
    metavar="HOST:PORT",
    callback=options.parsed(_parse_listen),
    default=":9653",
    show_default=True,
    help="Address for other nodes; without a host, all addresses.",
)
_STATE = click.option(
    "--services-state",
    metavar="FILE",
    type=options.PATH,
    help="Save the services here, for a start without their source. Default: in the run "
    "directory, which a reboot empties.",
)
_ADDRESS = click.option(
    "--localnet-address",
    metavar="HOST:PORT",
    callback=_loopback,
    help="Also serve service endpoints on this loopback port.",
)
_RUN_OPTIONS = (_SERVED, _SOURCE, _NODE, _ZONE, _LISTEN, tls_options, _STATE, _ADDRESS)
_HUB_OPTIONS = (_SOURCE, _HUB_LISTEN, tls_options, _STATE)


def hub_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of `podgate hub`; the command gets them as `service_endpoints`."""

    @functools.wraps(command)
    def wrapped(
        *,
        services_from: Source,
        services_listen: tuple[str, int],
        services_tls_ca: pathlib.Path | None,
        services_tls_cert: pathlib.Path | None,
        services_tls_key: pathlib.Path | None,
        services_state: pathlib.Path | None,
        **others: Any,
    ) -> None:
        tls = _tls(services_tls_ca, services_tls_cert, services_tls_key)
        if tls is None:
            raise click.UsageError(_NEEDS_TLS)
        chosen = ServiceSettings(
            source=services_from, listen=services_listen, tls=tls, state=services_state
        )
        command(service_endpoints=chosen, **others)

    return options.added(_HUB_OPTIONS, wrapped)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of service endpoints; the command gets them as `service_endpoints`."""

    @functools.wraps(command)
    def wrapped(
        *,
        service_endpoints: bool,
        services_from: Source,
        services_node: str | None,
        services_zone: str | None,
        services_listen: tuple[str, int] | None,
        services_tls_ca: pathlib.Path | None,
        services_tls_cert: pathlib.Path | None,
        services_tls_key: pathlib.Path | None,
        services_state: pathlib.Path | None,
        localnet_address: tuple[str, int] | None,
        **others: Any,
    ) -> None:
        is_in_cluster = others["node_name"] is not None
        tls = _tls(services_tls_ca, services_tls_cert, services_tls_key)
        is_served = service_endpoints or services_from is not None
        dependent = {
            "--localnet-address": localnet_address,
            "--services-listen": services_listen,
            "--services-state": services_state,
        }
        for name, value in dependent.items():
            if value and not is_served:
                raise click.UsageError(f"{name} needs --service-endpoints or --services-from")
        if service_endpoints and services_from is None and not is_in_cluster:
            raise click.UsageError("--service-endpoints needs --node-name or --services-from")
        if is_in_cluster and (services_node or services_zone):
            raise click.UsageError("--services-node and --services-zone need --manifests")
        if tls is None and (services_listen or isinstance(services_from, tuple)):
            raise click.UsageError(_NEEDS_TLS)
        chosen = ServiceSettings(
            source=services_from,
            node=services_node or os.uname().nodename,
            zone=services_zone or "",
            address=localnet_address,
            listen=services_listen,
            tls=tls,
            state=services_state,
        )
        command(service_endpoints=chosen if is_served else None, **others)

    return options.added(_RUN_OPTIONS, wrapped)


def _tls(
    authorities: pathlib.Path | None,
    certificate: pathlib.Path | None,
    key: pathlib.Path | None,
) -> TlsPaths | None:
    if authorities and certificate and key:
        return TlsPaths(authorities, certificate, key)
    if authorities or certificate or key:
        raise click.UsageError(
            "use --services-tls-ca, --services-tls-cert and --services-tls-key together"
        )
    return None

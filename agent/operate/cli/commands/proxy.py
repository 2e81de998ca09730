"""`podgate proxy`."""

import asyncio
import ipaddress
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.cli.commands import options
from agent.services.proxy.backends import BACKENDS, BackendKind, BackendOptions
from agent.settings import RUN_DIRECTORY

if TYPE_CHECKING:
    from agent.services.proxy.settings import ProxySettings

_S = TypeVar("_S")
_T = TypeVar("_T")

_TARGET = "unix:///run/podgate/localnet/localnet.sock"


@click.command(short_help="Run a service proxy (kube-proxy replacement).")
@click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    required=True,
    help="Kernel mechanism.",
)
@click.option(
    "--target",
    default=_TARGET,
    show_default=True,
    help="gRPC target of the service endpoints API.",
)
@click.option(
    "--service-proxy-name",
    metavar="NAME",
    default="",
    help="Proxy the services with this label service.kubernetes.io/service-proxy-name. Default: "
    "those without the label.",
)
@click.option(
    "--node-addresses",
    metavar="CIDR",
    multiple=True,
    help="Networks of the node's addresses that have node ports, or 'primary' for those of the "
    "default routes; repeatable. Default: all addresses.",
)
@click.option(
    "--pod-network",
    "pod_networks",
    metavar="CIDR",
    multiple=True,
    help="Pod CIDR; traffic from other sources is external.",
)
@click.option(
    "--iptables",
    "iptables_variant",
    type=click.Choice(["nft", "legacy"]),
    help="Variant of the iptables commands (iptables only). Default: the system's.",
)
@click.option(
    "--cgroup",
    type=options.PATH,
    help="Apply to sockets in this cgroup and below (ebpf only). Default: all sockets.",
)
@options.bpffs
@click.option(
    "--run-directory",
    type=options.PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="Directory of the proxy's lock.",
)
@click.option(
    "--metrics-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_optional_address),
    default="127.0.0.1:10249",
    show_default=True,
    help="Address of /metrics; empty: not served.",
)
@click.option(
    "--healthz-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_optional_address),
    default="0.0.0.0:10256",
    show_default=True,
    help="Address of /healthz and /livez; empty: not served.",
)
@click.option(
    "--started-file", type=options.PATH, help="File created once the first state is installed."
)
@options.log_format
@options.log_level
@click.option("--cleanup", is_flag=True, help="Remove everything this backend installed, and exit.")
def proxy(
    backend: str,
    target: str,
    service_proxy_name: str,
    node_addresses: tuple[str, ...],
    pod_networks: tuple[str, ...],
    iptables_variant: str | None,
    cgroup: pathlib.Path | None,
    bpffs: pathlib.Path,
    run_directory: pathlib.Path,
    metrics_address: tuple[str, int] | None,
    healthz_address: tuple[str, int] | None,
    started_file: pathlib.Path | None,
    log_format: str,
    log_level: str,
    cleanup: bool,
) -> None:
    """Run a service proxy from the endpoints that `podgate run --service-endpoints` publishes.

    Installed state stays in the kernel when the process exits, and the next process takes it over.
    """
    from agent import logs
    from agent.app import preflight
    from agent.linux import directories, locks
    from agent.services.proxy import node_addresses as proxy_node_addresses
    from agent.services.proxy.settings import ProxySettings

    settings = ProxySettings(
        target=target,
        service_proxy_name=service_proxy_name,
        node_addresses=_parsed(proxy_node_addresses.parse, node_addresses, "--node-addresses"),
        metrics_address=metrics_address,
        healthz_address=healthz_address,
        started_file=started_file,
    )
    networks = [_parsed(ipaddress.ip_network, text, "--pod-network") for text in pod_networks]
    logs.configure(LogFormat(log_format), LogLevel(log_level))
    preflight.check()
    directories.ensure_own(run_directory)
    directory = run_directory / "proxy"
    directory.mkdir(mode=0o700, exist_ok=True)
    kind = BACKENDS[backend]
    chosen = BackendOptions(bpffs, networks, iptables_variant or "default", cgroup)
    with locks.exclusive(directory):
        asyncio.run(kind.remove(chosen) if cleanup else _run(kind, chosen, settings))


async def _run(kind: BackendKind, options: BackendOptions, settings: "ProxySettings") -> None:
    from agent.services.proxy import process

    backend = await kind.open(options)
    try:
        await process.run(backend, settings)
    finally:
        await backend.close()


def _parsed(parse: Callable[[_S], _T], given: _S, option: str) -> _T:
    try:
        return parse(given)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error

"""`podgate doctor`; the checks are in agent.operate.doctor."""

import asyncio
import ipaddress
import pathlib
import sys

import click

from agent.operate.cli.commands import options
from agent.settings import RelayRanges


@click.command(short_help="Check this machine's kernel, its cluster and its agent.")
@options.output
@options.run_directory
@options.bpffs
@options.relay_range4
@options.relay_range6
@options.kubeconfig
@click.option(
    "--cri-socket",
    type=options.PATH,
    help="Socket of the container runtime. Default: the one that 'podgate run' finds.",
)
def doctor(
    output: options.Format,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
    relay_range4: ipaddress.IPv4Network,
    relay_range6: ipaddress.IPv6Network,
    kubeconfig: str | None,
    cri_socket: pathlib.Path | None,
) -> None:
    """Check kernel, network, cluster and agent, and print what to do about each finding.

    The cluster is checked where there is a service account or a kubeconfig. Changes nothing. Exit
    status 1 if a finding is open or broken.
    """
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import doctor as view
    from agent.operate.doctor import checks

    report = asyncio.run(
        checks.run(
            bpffs,
            run_directory,
            RelayRanges(relay_range4, relay_range6),
            kubeconfig=kubeconfig,
            cri_socket=cri_socket,
        )
    )
    screens.write(report, output, lambda screen: view.show(screen, report))
    if report.has_problem:
        sys.exit(1)

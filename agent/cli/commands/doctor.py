"""`podgate doctor`; the checks are in agent.cli.doctor."""

import asyncio
import ipaddress
import pathlib
import sys

import click

from agent.cli.commands import options
from agent.settings import RelayRanges


@click.command(short_help="Check this machine's kernel and configuration.")
@options.output
@options.run_directory
@options.bpffs
@options.relay_range4
@options.relay_range6
def doctor(
    output: options.Format,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
    relay_range4: ipaddress.IPv4Network,
    relay_range6: ipaddress.IPv6Network,
) -> None:
    """Check kernel, configuration and agent, and print what to do about each problem.

    Changes nothing. Exit status 1 if there is a problem; warnings do not change it.
    """
    from agent.cli import output as screens
    from agent.cli.doctor import Severity, run_checks
    from agent.cli.views import doctor as view

    ranges = RelayRanges(relay_range4, relay_range6)
    findings = asyncio.run(run_checks(bpffs, run_directory, ranges))
    screens.write(findings, output, lambda screen: view.show(screen, findings))
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        sys.exit(1)

"""The command line. Commands import what they need when they are called: `status` is quick."""

import asyncio
import pathlib
import sys

import click

from agent import VERSION
from agent.cli.commands import (
    cni,
    doctor,
    options,
    pods,
    probe,
    proxy,
    relay,
    rules,
    run,
    services,
    status,
)
from bpf import pins


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.version_option(VERSION, prog_name="podgate")
def main() -> None:
    """Closes the kubelet hole in NetworkPolicy.

    Gates on the pods' interfaces drop what the node itself starts; probes run from inside each
    pod's network namespace; conditions say what is true.
    """


@main.command(short_help="Remove all that podgate ever left in the kernel.")
@options.run_directory
@options.bpffs
def cleanup(run_directory: pathlib.Path, bpffs: pathlib.Path) -> None:
    """Remove every pin, link, filter, table, route and relay's interface that podgate ever made on
    this node.

    All gates open, and services that a proxy of ours carried are not carried any more. Stop both
    first: they would put them back.
    """
    from agent.app import network_managers, preflight
    from agent.cni import state as cni_state
    from agent.default_deny import table as default_deny_table
    from agent.errors import PreflightError
    from agent.linux import locks
    from agent.proxy import nftables
    from agent.proxy.backends import BackendError
    from agent.strict import veth_pair
    from bpf import cleanup as bpf_cleanup
    from bpf import errors

    installation = pins.Pins(bpffs)
    try:
        preflight.check()
        with (
            locks.exclusive_if_present(run_directory),
            locks.exclusive_if_present(run_directory / "proxy"),
            locks.exclusive_if_present(installation.root),
        ):
            cni_state.retire(run_directory)
            removed = bpf_cleanup.remove_everything(installation)
            asyncio.run(default_deny_table.remove())
            asyncio.run(veth_pair.remove_everything())
            asyncio.run(nftables.remove())
            network_managers.let_in_again()
    except (
        PreflightError,
        locks.Locked,
        errors.AttachError,
        default_deny_table.DefaultDenyError,
        veth_pair.PairError,
        BackendError,
        OSError,
    ) as error:
        options.fail(error)
    click.echo(f"Removed {removed.pins} pins and {removed.filters} filters.")


@main.command(short_help="Show the whole job on this machine.")
@options.output
def demo(output: str) -> None:
    """Show the whole job on this machine, in namespaces that end with it."""
    from agent.demo import supervisor

    sys.exit(supervisor.run(output))


main.add_command(run.run)
main.add_command(status.status)
main.add_command(status.drops)
main.add_command(pods.pods)
main.add_command(probe.probe)
main.add_command(rules.rules)
main.add_command(rules.suggest)
main.add_command(doctor.doctor)
main.add_command(cni.cni)
main.add_command(proxy.proxy)
main.add_command(relay.probes)
main.add_command(relay.relay)
main.add_command(services.services)

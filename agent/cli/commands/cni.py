"""The command line of `podgate cni`."""

import pathlib

import click

from agent.cli.commands import options
from agent.settings import CNI_BIN_DIRECTORY, CNI_CONF_DIRECTORY, RUN_DIRECTORY
from bpf import pins

_conf_directory = click.option(
    "--cni-conf-dir",
    type=options.PATH,
    default=CNI_CONF_DIRECTORY,
    show_default=True,
    help="Where the container runtime looks for networks.",
)
kept_conf_directory = click.option(
    "--cni-conf-dir",
    type=options.PATH,
    help="Keep podgate-cni in the network that is configured there, usually /etc/cni/net.d.",
)
bin_directory = click.option(
    "--cni-bin-dir",
    type=options.PATH,
    default=CNI_BIN_DIRECTORY,
    show_default=True,
    help="Where the container runtime looks for CNI plugins.",
)
strict_start = click.option(
    "--cni-strict-start",
    is_flag=True,
    help="After a reboot pods wait for the agent; else they start without a gate until it comes.",
)


@click.group(short_help="Have pods gated before they start.")
def cni() -> None:
    """Have the container runtime gate each pod before its containers start.

    podgate-cni does it, as the last plugin of the node's network, whether or not the agent is
    there.
    """


@cni.command(short_help="Put podgate-cni into the node's network.")
@_conf_directory
@bin_directory
@strict_start
@click.option(
    "--binary",
    type=options.PATH,
    help="The plugin to copy; by default the one that was built with this podgate.",
)
@click.option(
    "--run-directory",
    type=options.PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="The agent's, as the node sees it.",
)
@click.option(
    "--bpffs",
    type=options.PATH,
    default=pins.DEFAULT_BPFFS,
    show_default=True,
    help="The agent's, as the node sees it.",
)
def install(
    cni_conf_dir: pathlib.Path,
    cni_bin_dir: pathlib.Path,
    cni_strict_start: bool,
    binary: pathlib.Path | None,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Copy podgate-cni to the plugins, and make it the last one of the node's network.

    Everything else in the file stays as it is. Safe to repeat, and to interrupt.
    """
    from agent.cni.installer import BUILT, CniError, CniInstaller

    plugin = CniInstaller(
        conf_directory=cni_conf_dir,
        bin_directory=cni_bin_dir,
        binary=binary or BUILT,
        is_strict=cni_strict_start,
        run_directory=run_directory,
        bpffs=bpffs,
    )
    try:
        has_changed = plugin.install()
    except CniError as error:
        options.fail(error)
    click.echo("Installed." if has_changed else "Nothing to do: it is installed.")


@cni.command(short_help="Take podgate-cni out again.")
@_conf_directory
@bin_directory
@click.option(
    "--keep-binary",
    is_flag=True,
    help="For CRI-O, which ends pods by the network they were started with.",
)
def remove(cni_conf_dir: pathlib.Path, cni_bin_dir: pathlib.Path, keep_binary: bool) -> None:
    """Leave both directories as they were. Gates stay; the agent or the pods' end takes them."""
    from agent.cni.installer import CniError, CniInstaller

    plugin = CniInstaller(conf_directory=cni_conf_dir, bin_directory=cni_bin_dir)
    try:
        has_changed = plugin.remove(is_binary_kept=keep_binary)
    except CniError as error:
        options.fail(error)
    click.echo("Removed." if has_changed else "Nothing to do: it is not installed.")

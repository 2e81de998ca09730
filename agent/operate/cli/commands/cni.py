"""`podgate cni`."""

import pathlib

import click

from agent.operate.cli.commands import options
from agent.settings import CNI_BIN_DIRECTORY, CNI_CONF_DIRECTORY, RUN_DIRECTORY
from bpf import pins

conf_directory = click.option(
    "--cni-conf-dir",
    type=options.PATH,
    default=CNI_CONF_DIRECTORY,
    show_default=True,
    help="CNI configuration directory.",
)
kept_conf_directory = click.option(
    "--cni-conf-dir",
    type=options.PATH,
    help="CNI configuration directory, usually /etc/cni/net.d; keeps podgate-cni configured there.",
)
bin_directory = click.option(
    "--cni-bin-dir",
    type=options.PATH,
    default=CNI_BIN_DIRECTORY,
    show_default=True,
    help="CNI plugin directory.",
)
strict_start = click.option(
    "--cni-strict-start",
    is_flag=True,
    help="After a reboot, block pod starts until the agent runs. Default: pods start without a "
    "gate.",
)


@click.group(short_help="Manage the CNI plugin that gates pods before they start.")
def cni() -> None:
    """Manage podgate-cni, the last plugin of the node's CNI network, which attaches gates before
    containers start, also while the agent is down.
    """


@cni.command(short_help="Add podgate-cni to the CNI configuration.")
@conf_directory
@bin_directory
@strict_start
@click.option(
    "--binary",
    type=options.PATH,
    help="Plugin to copy. Default: the one built with podgate.",
)
@click.option(
    "--run-directory",
    type=options.PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="Path of the agent's, as seen from the node.",
)
@click.option(
    "--bpffs",
    type=options.PATH,
    default=pins.DEFAULT_BPFFS,
    show_default=True,
    help="Path of the agent's, as seen from the node.",
)
def install(
    cni_conf_dir: pathlib.Path,
    cni_bin_dir: pathlib.Path,
    cni_strict_start: bool,
    binary: pathlib.Path | None,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Copy podgate-cni to the plugin directory and append it to the node's CNI network.

    The rest of the configuration is not changed. Safe to repeat and to interrupt.
    """
    from agent.cni.installer import BUILT, CniInstaller

    plugin = CniInstaller(
        conf_directory=cni_conf_dir,
        bin_directory=cni_bin_dir,
        binary=binary or BUILT,
        is_strict=cni_strict_start,
        run_directory=run_directory,
        bpffs=bpffs,
    )
    has_changed = plugin.install()
    click.echo("Installed." if has_changed else "Nothing to do: already installed.")


@cni.command(short_help="Remove podgate-cni from the CNI configuration.")
@conf_directory
@bin_directory
@click.option(
    "--keep-binary",
    is_flag=True,
    help="Keep the plugin binary (CRI-O needs it to delete running pods).",
)
def remove(cni_conf_dir: pathlib.Path, cni_bin_dir: pathlib.Path, keep_binary: bool) -> None:
    """Restore the CNI configuration and delete the plugin. Attached gates stay until the agent or
    the pod's deletion removes them.

    Fails while an agent with --cni-conf-dir runs, which would add the plugin again.
    """
    from agent.cni.installer import CniInstaller

    plugin = CniInstaller(conf_directory=cni_conf_dir, bin_directory=cni_bin_dir)
    has_changed = plugin.remove(is_binary_kept=keep_binary)
    click.echo("Removed." if has_changed else "Nothing to do: not installed.")

"""`podgate cleanup`."""

import pathlib
import signal

import click

from agent.operate.cli.commands import cni, options

# With --pod-directory: what is left until another process ends.
_RETRY_SECONDS = 2.0


@click.command(short_help="Remove everything podgate installed on this node.")
@click.option(
    "--uninstall",
    is_flag=True,
    help="Remove podgate-cni and the run directory with all saved state, too.",
)
@cni.conf_directory
@cni.bin_directory
@click.option(
    "--keep-cni-binary",
    is_flag=True,
    help="With --uninstall: keep podgate-cni's binary (CRI-O needs it to delete running pods).",
)
@click.option(
    "--services-state",
    envvar="PODGATE_SERVICES_STATE",
    show_envvar=True,
    type=options.PATH,
    help="With --uninstall: remove the agent's file of services, too, and its directory if that is "
    "empty then.",
)
@click.option(
    "--pod-directory",
    type=options.PATH,
    help="Repeat until nothing is left, then create the file 'ready' there, and wait for SIGTERM: "
    "for a DaemonSet.",
)
@options.run_directory
@options.bpffs
def cleanup(
    uninstall: bool,
    cni_conf_dir: pathlib.Path,
    cni_bin_dir: pathlib.Path,
    keep_cni_binary: bool,
    services_state: pathlib.Path | None,
    pod_directory: pathlib.Path | None,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Remove all pins, links, filters, tables, routes and relay interfaces of podgate on this node.

    All gates open, whatever state the agent is in, and services proxied by podgate stop. Stop the
    agent and the proxy first: beside an agent, which then stays off, and beside a proxy, whose
    services stay, the command fails once it has removed all else. For a whole cluster use 'kubectl
    podgate uninstall'.
    """
    from agent.app import preflight, removal
    from agent.cni.installer import CniInstaller
    from bpf import pins

    # Those that wait for the end of the pod are not to miss it.
    ends = {signal.SIGTERM, signal.SIGINT}
    if pod_directory is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    preflight.check_rights()
    plugin = None
    if uninstall:
        plugin = CniInstaller(conf_directory=cni_conf_dir, bin_directory=cni_bin_dir)
    if pod_directory is not None:
        (pod_directory / "ready").unlink(missing_ok=True)
    problem = ""
    while True:
        try:
            removed = removal.remove(
                run_directory,
                pins.Pins(bpffs),
                plugin=plugin,
                is_binary_kept=keep_cni_binary,
                services_state=services_state if uninstall else None,
            )
            break
        except removal.IncompleteError as error:
            if pod_directory is None:
                raise
            # The container would start again later and later.
            if str(error) != problem:
                problem = str(error)
                click.echo(f"podgate: {problem}", err=True)
            if signal.sigtimedwait(ends, _RETRY_SECONDS):
                return
    click.echo(
        f"Removed {removed.pins} pins, {removed.filters} filters, and all tables, routes and relay "
        "interfaces of podgate."
    )
    if not uninstall and run_directory.is_dir():
        click.echo(f"Saved state is still in {run_directory}; --uninstall removes it, too.")
    if pod_directory is not None:
        (pod_directory / "ready").touch()
        signal.sigwait(ends)

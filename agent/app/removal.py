"""What podgate has on a node: detached without an agent, or removed as a whole."""

import asyncio
import pathlib
import shutil

from agent.app import network_managers
from agent.cni import state as cni_state
from agent.cni.installer import CniInstaller
from agent.default_deny import table as default_deny_table
from agent.linux import locks
from agent.services.proxy import iptables, ipvs, nftables
from agent.strict import veth_pair
from bpf import cleanup, pins


def detach(run_directory: pathlib.Path, installation: pins.Pins) -> cleanup.Removed:
    """Open the node without its agent: no gate, no hook, no relay, no default-deny table.

    Pods that start from now on get no gate either, and podgate-cni does not hold them back. Raises
    the errors of `remove`, and takes no lock: an agent that hangs has them.
    """
    cni_state.retire(run_directory)
    removed = cleanup.detach_everything(installation)
    asyncio.run(default_deny_table.remove())
    asyncio.run(veth_pair.remove_everything())
    return removed


def remove(
    run_directory: pathlib.Path,
    installation: pins.Pins,
    *,
    plugin: CniInstaller | None = None,
    is_binary_kept: bool = False,
) -> cleanup.Removed:
    """Remove everything of podgate and its proxy, but for the files of the run directory.

    plugin: podgate-cni, to remove it and the run directory, too; is_binary_kept: as
    `CniInstaller.remove`. The order leaves a node that works after each step: pods that start are
    not held back once `detach` is done. Raises `AlreadyRunningError`, `AttachError`, `CniError`,
    `DefaultDenyError`, `PairError`, `BackendError` or `OSError`.
    """
    with (
        locks.exclusive_if_present(run_directory),
        locks.exclusive_if_present(run_directory / "proxy"),
        locks.exclusive_if_present(installation.root),
    ):
        detached = detach(run_directory, installation)
        if plugin is not None:
            plugin.remove(is_binary_kept=is_binary_kept)
        pinned = installation.remove_everything()
        asyncio.run(nftables.remove())
        asyncio.run(iptables.remove())
        asyncio.run(ipvs.remove())
        network_managers.remove_exclusion()
        if plugin is not None and run_directory.is_dir():
            shutil.rmtree(run_directory)
    return cleanup.Removed(detached.pins + pinned, detached.filters)

"""What podgate has on a node: detached without an agent, or removed as a whole.

Each step is tried, also after one that failed, and nothing is written to a disk before all programs
are detached: an exit has to work with a full or read-only run directory, and beside an agent that
hangs.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

from agent import state_files
from agent.app import network_managers
from agent.cni import state as cni_state
from agent.cni.installer import CniInstaller
from agent.default_deny import table as default_deny_table
from agent.errors import PodgateError
from agent.linux import locks
from agent.pods import off_marks
from agent.services.proxy import iptables, ipvs, nftables
from agent.strict import orphans, veth_pair
from agent.strict.process import RelayProcess
from bpf import cleanup, pins
from bpf.errors import KernelSideError


class IncompleteError(PodgateError):
    """Something of podgate is left; the message has each problem."""


@dataclasses.dataclass(slots=True)
class Progress:
    """What the steps have done until now. problems: one sentence each."""

    removed: cleanup.Removed = dataclasses.field(default_factory=lambda: cleanup.Removed(0, 0))
    problems: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """An error in the block is a problem, and no reason to leave out the next step."""
        try:
            yield
        except (PodgateError, KernelSideError, OSError) as error:
            self.problems.append(str(error) or type(error).__name__)

    def check(self) -> None:
        """Raises `IncompleteError` if there was a problem."""
        if self.problems:
            raise IncompleteError(" ".join(one.rstrip(".") + "." for one in self.problems))


def open_gates(installation: pins.Pins) -> Progress:
    """Detach all programs and remove the default-deny table; writes no file, takes no lock.

    The host reaches all pods then. A relay keeps its open connections.
    """
    progress = Progress()
    # An agent that runs looks here before it puts back what is missing.
    with contextlib.suppress(OSError):
        off_marks.put_in_kernel(installation)
    with progress.step():
        progress.removed = cleanup.detach_everything(installation)
    with progress.step():
        asyncio.run(default_deny_table.remove())
    return progress


def keep_off(run_directory: pathlib.Path, installation: pins.Pins, progress: Progress) -> None:
    """Have agents attach nothing, and podgate-cni hold no new pod back."""
    with progress.step():
        off_marks.put(run_directory, installation)
    # podgate-cni reads the marks, but for that of an earlier version.
    with contextlib.suppress(OSError):
        cni_state.retire(run_directory)


def detach(run_directory: pathlib.Path, installation: pins.Pins) -> Progress:
    """Open the node without its agent: no gate, no hook, no relay, no default-deny table.

    Pods that start from now on get no gate either, and podgate-cni does not hold them back.
    """
    progress = open_gates(installation)
    keep_off(run_directory, installation, progress)
    with progress.step():
        asyncio.run(remove_relays())
    return progress


async def remove_relays() -> None:
    """Remove the interfaces and routes of all relays, and kill the relays: one that hangs does not
    see that its interface is gone.

    Raises `PairError`, `OSError` or `TimeoutError`, once it has removed what it can.
    """
    found: list[RelayProcess] = []
    try:
        found = await orphans.find()
    finally:
        await veth_pair.remove_everything()
        for process in found:
            await process.kill()


def has_agent(run_directory: pathlib.Path, installation: pins.Pins) -> bool:
    """Whether a process holds an agent's lock: one that runs, starts or hangs."""
    return locks.is_held(run_directory) or locks.is_held(installation.root)


def remove(
    run_directory: pathlib.Path,
    installation: pins.Pins,
    *,
    plugin: CniInstaller | None = None,
    is_binary_kept: bool = False,
    services_state: pathlib.Path | None = None,
) -> cleanup.Removed:
    """Remove everything of podgate and its proxy, but for the files of the run directory.

    plugin: podgate-cni, to remove it and the run directory, too; is_binary_kept: as
    `CniInstaller.remove`; services_state: a file of the agent elsewhere. The order leaves a node
    that works after each step: pods that start are not held back once `detach` is done.

    Beside an agent the marks of `podgate off --node` stay, so that it attaches nothing again;
    beside a proxy its services stay. Both are an `IncompleteError`, as is any problem.
    """
    progress = detach(run_directory, installation)
    if plugin is not None:
        with progress.step():
            plugin.remove(is_binary_kept=is_binary_kept)
    pinned = 0
    with progress.step():
        pinned = installation.remove_objects()
    with progress.step():
        network_managers.remove_exclusion()
    _remove_proxy(run_directory, progress)
    if has_agent(run_directory, installation):
        progress.problems.append(
            "podgate's objects are removed, but an agent still runs: another process holds the "
            f"lock of {run_directory} or {installation.root}. It stays off; stop it, and repeat "
            "this command"
        )
        progress.check()
    with progress.step():
        off_marks.remove(run_directory, installation)
    with progress.step():
        installation.remove_everything()
    if plugin is not None and run_directory.is_dir() and not progress.problems:
        with progress.step():
            shutil.rmtree(run_directory)
    if services_state is not None:
        with progress.step():
            state_files.remove(services_state)
    progress.check()
    return cleanup.Removed(progress.removed.pins + pinned, progress.removed.filters)


def _remove_proxy(run_directory: pathlib.Path, progress: Progress) -> None:
    if locks.is_held(run_directory / "proxy"):
        progress.problems.append("podgate proxy is running, so its services stay; stop it first")
        return
    for backend in (nftables, iptables, ipvs):
        with progress.step():
            asyncio.run(backend.remove())

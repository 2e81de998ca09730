"""`podgate off --node` as a file: it works without an agent, and each later agent follows it.

It is in the run directory, which a reboot empties: what lasts longer is a label of the node.
"""

import asyncio
import pathlib

from agent.pods.pod_modes import PodModes

_NAME = "off"
_POLL_SECONDS = 0.5


def path(run_directory: pathlib.Path) -> pathlib.Path:
    return run_directory / _NAME


class OffFile:
    """Sets the node's ceiling to off while the file exists."""

    def __init__(self, run_directory: pathlib.Path, modes: PodModes) -> None:
        self._path = path(run_directory)
        self._modes = modes

    def read(self) -> None:
        """Blocks for one system call; for the start, before all that acts on modes."""
        self._modes.set_off(is_off=self._path.exists())

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            is_off = await asyncio.to_thread(self._path.exists)
            self._modes.set_off(is_off=is_off)
            await asyncio.sleep(_POLL_SECONDS)

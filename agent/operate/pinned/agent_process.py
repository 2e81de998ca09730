"""The agent that holds the node, by its lock: whether one runs that does not answer."""

import dataclasses
import os
import pathlib
import time

from agent.linux.locks import lock_of
from agent.linux.procfs import Procfs


@dataclasses.dataclass(frozen=True, slots=True)
class AgentProcess:
    """pid: in this process' pid namespace; age_seconds: since it started."""

    pid: int
    age_seconds: float


def find(directory: pathlib.Path) -> AgentProcess | None:
    """The process that holds the lock of podgate's directory; None if there is none, or none of
    this pid namespace. It takes no lock, which an agent that starts might miss. Blocks."""
    procfs = Procfs()
    try:
        status = lock_of(directory).stat()
    except OSError:
        return None
    device = os.major(status.st_dev), os.minor(status.st_dev)
    for pid in procfs.lock_holders(*device, status.st_ino):
        if (ticks := procfs.started(pid)) is not None:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            return AgentProcess(pid, max(0.0, now - ticks / os.sysconf("SC_CLK_TCK")))
    return None

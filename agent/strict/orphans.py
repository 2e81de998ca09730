"""Relays without their agents: found on the node, and ended.

A relay continues when its agent is killed, restarted or upgraded (`agent.relay.orphanhood`). It is
the process in the network namespace at the other end of a relay's interface. Only the node's root
gets a process in there, so nothing else counts as one, no record is kept, and relays of all
versions are found.
"""

import asyncio
import contextlib

from agent.linux import cgroups, rtnetlink
from agent.linux.pod_network import netns_number
from agent.linux.procfs import Procfs
from agent.relay import interfaces as relay_interfaces
from agent.strict.process import RelayProcess

# An argument of its process: of other processes the namespace is not read.
_MODULE = "agent.relay"
_TIMEOUT_SECONDS = 5


async def find() -> list[RelayProcess]:
    """All relays of this node, of any agent; the caller releases or kills each.

    Raises `OSError` or `TimeoutError`.
    """
    if not relay_interfaces.present():
        return []
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        with contextlib.ExitStack() as undo:
            processes = []
            for pid in await asyncio.to_thread(candidates, Procfs()):
                try:
                    # First of all: from here on the pid means this process, or none.
                    process = RelayProcess(pid)
                except ProcessLookupError:
                    continue
                undo.callback(process.release)
                processes.append((process, await netns_number(f"/proc/{pid}/ns/net")))
            # Links come last: a process that still runs keeps the number of its namespace. That of
            # a relay that ends is the next one's, perhaps of a relay of another node here.
            links = [await rtnetlink.find(ifindex) for ifindex in relay_interfaces.present()]
            numbers = {link.peer_nsid for link in links if link} - {None}
            undo.pop_all()
        found = []
        for process, number in processes:
            if number in numbers and process.is_running:
                found.append(process)
            else:
                process.release()
        return found


def cgroup_ids(processes: list[RelayProcess]) -> set[int]:
    """Ids of the cgroups that these processes are in. May block."""
    root, procfs = cgroups.cgroup2_mount(), Procfs()
    if root is None:
        return set()
    paths = {procfs.cgroup(process.pid) for process in processes} - {None}
    return {found[-1] for path in paths if path and (found := cgroups.ancestors(root, path))}


def candidates(procfs: Procfs) -> list[int]:
    """Processes of root alone with the relay's module as an argument. May block.

    A read of a command line waits while the process changes its memory, for as long as its user
    likes: so those of other users are not read.
    """
    return [
        pid
        for pid in procfs.pids()
        if set(procfs.users(pid)) == {0} and _MODULE in procfs.arguments(pid)
    ]

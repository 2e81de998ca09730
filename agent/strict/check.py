"""Checks whether mode strict works on this machine, without changing it."""

import asyncio
import functools
import os
import pathlib

from agent.linux import link_setup
from agent.linux.namespaces import in_new_network
from agent.settings import RelayRanges
from agent.strict import veth_pair
from agent.strict.veth_pair import PairError
from bpf import hooks, pins, program_specs, sources
from bpf.netlink import NetlinkError
from probes.netns import netns_cookie

NO_COOKIE = (
    "this kernel has no network namespace cookies (Linux 5.14), so a hook cannot distinguish "
    "sockets of the host and of pods"
)
_TIMEOUT_SECONDS = 10


async def find_problem(
    ranges: RelayRanges, cgroup: pathlib.Path, installation: pins.Pins
) -> str | None:
    """One sentence about why strict does not work, or None."""
    if netns_cookie() is None:
        return f"{NO_COOKIE}."
    if problem := await _pair_problem():
        return f"{problem}."
    try:
        if problem := await veth_pair.overlap(ranges):
            return problem[:1].upper() + problem[1:]
    except PairError as error:
        return str(error)
    return _redirect_problem(cgroup, installation)


async def _pair_problem() -> str | None:
    """Create a veth pair in a temporary namespace."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            add = functools.partial(link_setup.add_pair_here, "try0", "try1")
            await asyncio.to_thread(in_new_network, add)
    except TimeoutError:
        return f"netlink did not respond within {_TIMEOUT_SECONDS} s"
    except NetlinkError as error:
        return f"cannot create a veth pair ({error.strerror}); load the module veth"
    except OSError as error:
        return str(error)
    return None


def _redirect_problem(cgroup: pathlib.Path, installation: pins.Pins) -> str | None:
    root_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for hook in program_specs.RELAY_HOOKS:
            if problem := hooks.describe_exclusive(root_fd, hook):
                return f"{problem}."
    finally:
        os.close(root_fd)
    # The kernel's verdict on the programs is known once an agent has loaded them.
    directory = installation.programs / sources.fingerprint()
    for hook in program_specs.RELAY_HOOKS:
        if directory.is_dir() and not (directory / hook.name).exists():
            return f"This kernel rejects the program {hook.name}."
    return None

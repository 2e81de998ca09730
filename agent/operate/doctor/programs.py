"""Checks of programs that others attach where podgate does."""

import os
import pathlib
import socket
from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.linux.cgroups import cgroup2_mount
from agent.operate.doctor.results import Passed, Result
from bpf import abi, errors, neighbours, pins
from bpf.attachments import Direction
from bpf.neighbours import Chain


def check(bpffs: pathlib.Path) -> Iterator[Result]:
    installation = pins.Pins(bpffs)
    try:
        chains = [
            chain for direction in Direction for chain in neighbours.chains(installation, direction)
        ]
        yield from _of_chains(chains)
        yield from _of_hooks(installation)
    except (errors.KernelSideError, OSError) as error:
        yield found(kinds.PROGRAMS_UNREADABLE, f"Programs of others cannot be read: {error}")


def _of_chains(chains: list[Chain]) -> Iterator[Result]:
    for chain in chains:
        if chain.before:
            name = _interface(chain.ifindex)
            yield found(
                kinds.GATE_NOT_FIRST,
                f"{_listed(chain.before)} runs before the gate on {name}, and packets that it "
                "accepts pass no gate",
            )
    if any(chain.before for chain in chains):
        return
    after = sorted({name for chain in chains for name in chain.after})
    gates = len({chain.ifindex for chain in chains})
    text = f"Each gate ({gates} interfaces) is first in its chain"
    yield Passed("chain-order", f"{text}; {_listed(after)} after it." if after else f"{text}.")


def _of_hooks(installation: pins.Pins) -> Iterator[Result]:
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = {
            name
            for hook in abi.HOOKS
            for name in neighbours.beside_hook(root_fd, installation, hook)
        }
    finally:
        os.close(root_fd)
    text = "No program of others is on podgate's hooks of the root cgroup."
    if found:
        text = (
            f"{_listed(sorted(found))} at the root cgroup, next to podgate's hooks: each may "
            "reject, none can admit what another rejects."
        )
    yield Passed("hooks-beside", text)


def _interface(ifindex: int) -> str:
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"interface {ifindex}"


def _listed(names: "tuple[str, ...] | list[str]") -> str:
    return ("Program " if len(names) == 1 else "Programs ") + ", ".join(names)

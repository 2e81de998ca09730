"""Checks of programs that others attach where podgate does."""

import os
import pathlib
import socket
from collections.abc import Iterator, Mapping

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.linux.cgroups import cgroup2_mount
from agent.operate.doctor.results import Passed, Result
from bpf import errors, neighbours, pins, program_specs
from bpf.attachments import Direction
from bpf.neighbours import BesideHook, Chain

_CONNECT_HOOKS = ("hook_connect4", "hook_connect6")


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
    gates = {chain.ifindex for chain in chains}
    filters = {chain.ifindex for chain in chains if not chain.is_linked}
    by_filter = f", {len(filters)} of them by a filter" if filters else ""
    text = f"Each attached gate ({len(gates)} interfaces{by_filter}) is first in its chain"
    yield Passed("chain-order", f"{text}; {_listed(after)} after it." if after else f"{text}.")


def _of_hooks(installation: pins.Pins) -> Iterator[Result]:
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        beside = {
            hook: neighbours.beside_hook(root_fd, installation, hook)
            for hook in program_specs.HOOKS
        }
    finally:
        os.close(root_fd)
    found = sorted({name for one in beside.values() for name in (*one.before, *one.after)})
    text = "No program of others is on podgate's hooks of the root cgroup."
    if found:
        text = (
            f"{_listed(found)} at the root cgroup, next to podgate's hooks: each may "
            "reject, none can admit what another rejects."
        )
    yield Passed("hooks-beside", text + _order_of_connects(beside))


def _order_of_connects(beside: Mapping[program_specs.HookSpec, BesideHook]) -> str:
    """What a load balancer in connect(2), as Calico's and Cilium's, changes for host processes."""
    connects = [one for hook, one in beside.items() if hook.name in _CONNECT_HOOKS]
    before = sorted({name for one in connects for name in one.before})
    after = sorted({name for one in connects for name in one.after})
    text = ""
    if before:
        text += (
            f" {_listed(before)} before podgate's connect hook: a connection to an address of a "
            "service that is translated there is rejected at once (EPERM)."
        )
    if after:
        text += (
            f" {_listed(after)} after podgate's connect hook: a connection to an address of a "
            "service that is translated there is dropped by the gate and times out."
        )
    return text


def _interface(ifindex: int) -> str:
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"interface {ifindex}"


def _listed(names: "tuple[str, ...] | list[str]") -> str:
    return ("Program " if len(names) == 1 else "Programs ") + ", ".join(names)

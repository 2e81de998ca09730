"""Other programs beside podgate's: on the interfaces of gates, and on the hooks of the root cgroup.

A program that runs before the gate and accepts a packet ends the chain. At a cgroup all programs
run, and each may reject.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

from bpf import clsact, errors, pins, program_specs, syscalls
from bpf.attachments import Direction

# The kernel keeps 15 bytes of a name (BPF_OBJ_NAME_LEN).
_NAMES = {hook.name[:15] for hook in (*program_specs.HOOKS, *program_specs.RELAY_HOOKS)}
_OF_DIRECTION = {
    Direction.EGRESS: program_specs.GATE_EGRESS,
    Direction.INGRESS: program_specs.GATE_INGRESS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The programs of an interface beside the gate's, by name, in the order in which they run.

    is_linked: whether the gate itself is attached by tcx, which only its owner detaches; other
    programs can remove a filter.
    """

    ifindex: int
    is_linked: bool
    before: tuple[str, ...]
    after: tuple[str, ...]


def chains(installation: pins.Pins, direction: Direction) -> Iterator[Chain]:
    """Of each interface that has a gate, of any version, in the calling thread's namespace.

    Raises `BpfError`.
    """
    attach_type, parent = direction.value
    program = _OF_DIRECTION[direction]
    filters = clsact.ClsactFilters(installation, program, -1, parent)
    with contextlib.closing(filters):
        linked = set(installation.linked_ifindexes(program))
        for schema in installation.other_schemas():
            linked.update(installation.linked_ifindexes(program, schema))
        filtered = set().union(*filters.refresh())
        for ifindex in sorted(linked | filtered):
            # All tcx programs run before all filters (Linux 6.6, e420bed02507).
            # All of podgate's: the relay's pair has one before the gate.
            own = {
                syscalls.link_program_id(fd)
                for name in program_specs.PROGRAMS
                for fd in _links(installation, name, ifindex)
            }
            linked_programs = _tcx_programs(ifindex, attach_type)
            order = [*((one, one in own) for one in linked_programs), *filters.order(ifindex)]
            positions = [position for position, (_, is_ours) in enumerate(order) if is_ours]
            if positions:
                before, after = order[: positions[0]], order[positions[0] :]
                is_linked = positions[0] < len(linked_programs)
                yield Chain(ifindex, is_linked, _names(before), _names(after))


@dataclasses.dataclass(frozen=True, slots=True)
class BesideHook:
    """The programs of others that are attached to a cgroup itself as one hook, by name, in the
    order in which they run: before podgate's program, and after it (all, if it is not attached)."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def beside_hook(
    cgroup_fd: int, installation: pins.Pins, hook: program_specs.HookSpec
) -> BesideHook:
    """The neighbours of one of the hooks. Programs with the names of podgate's are left out:
    the relay's hooks, and those of an agent for another node of this kernel.

    Raises `BpfError`.
    """
    own = set()
    for path in installation.find_links(hook.name):
        with pins.opened(path) as link_fd:
            own.add(syscalls.link_program_id(link_fd))
    order, _ = syscalls.query_cgroup_programs(cgroup_fd, hook.attach_type)
    first = next((place for place, program in enumerate(order) if program in own), 0)
    before, after = (
        tuple(_name(one) for one in part if syscalls.program_name(one) not in _NAMES)
        for part in (order[:first], order[first:])
    )
    return BesideHook(before, after)


def _links(installation: pins.Pins, program: str, ifindex: int) -> Iterator[int]:
    name = os.path.basename(installation.link(program, ifindex))
    for path in installation.find_links(name) + installation.find_links(name + pins.MOVING):
        with pins.opened(path) as link_fd:
            yield link_fd


def _tcx_programs(ifindex: int, attach_type: int) -> list[int]:
    """None before Linux 6.6, and none if the interface is gone."""
    try:
        return syscalls.query_programs(ifindex, attach_type)
    except errors.BpfError:
        return []


def _names(order: Sequence[tuple[int | None, bool]]) -> tuple[str, ...]:
    return tuple(
        "a filter without a program" if program is None else _name(program)
        for program, is_ours in order
        if not is_ours
    )


def _name(program: int) -> str:
    return f"{name} (id {program})" if (name := syscalls.program_name(program)) else f"id {program}"

"""Removal of what other versions of podgate left in the kernel, or of everything. It needs no
programs and no readable maps."""

import contextlib
import dataclasses
import os
import pathlib
import re

from bpf import clsact, errors, pins, program_specs, syscalls

_HOOKS = (*program_specs.OPTIONAL_PROGRAMS, *program_specs.EGRESS_HOOKS)
_PROGRAMS = {*program_specs.PROGRAMS, *(hook.name for hook in _HOOKS)}
# As in `Pins.link`; names of links that belong to no interface are their programs'.
_LINK_SUFFIX = re.compile(rf"(-\d+)?({pins.MOVING})?$")


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """Numbers of removed objects."""

    pins: int
    filters: int


def detach_unknown(installation: pins.Pins) -> list[str]:
    """Detach podgate's programs that this version does not have, in the calling thread's namespace
    and at the root cgroup. Returns their names.

    An older version may have named a program otherwise, and a newer one that was rolled back may
    have more: this version would neither replace nor detach them, and they would use maps that no
    agent writes. Call it when all programs of this version are attached, so that nothing opens. A
    version that stands by attaches its own again when it gets the node back. Raises `AttachError`,
    `BpfError` or `OSError`.
    """
    names: set[str] = set()
    # Egress first, as in `detach_everything`.
    for parent in (clsact.EGRESS, clsact.INGRESS):
        with contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent)) as every:
            attached = every.programs()
        # A name without a program would stand for all of them.
        for name in set[str]().union(*attached.values()) - _PROGRAMS - {""}:
            with contextlib.closing(clsact.ClsactFilters(installation, name, -1, parent)) as found:
                for ifindex, programs in attached.items():
                    if name in programs:
                        found.detach(ifindex)
            names.add(name)
    for path in sorted(installation.root.glob("v*/links/*")):
        name = _program_of(path)
        if name not in _PROGRAMS:
            _detach_link(path)
            names.add(name)
    return sorted(names)


def detach_everything(installation: pins.Pins) -> Removed:
    """Detach all programs, also those of gates in the calling thread's namespace, and unpin their
    links. Programs and maps stay pinned, so a running agent can attach them again.

    A filter or link that cannot be detached keeps no other one attached. Raises the first error:
    `AttachError`, or `OSError` when a pin cannot be removed.
    """
    problems: list[Exception] = []
    filters = 0
    # Egress first: while it enforces, ingress must record the pod's flows.
    for parent in (clsact.EGRESS, clsact.INGRESS):
        try:
            with contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent)) as found:
                for ifindex in set().union(*found.refresh()):
                    found.detach(ifindex)
                    filters += 1
        except (errors.AttachError, OSError) as error:
            problems.append(error)
    links = sorted(installation.root.glob("v*/links/*"), key=_comes_later)
    programs = _pinned_programs(installation)
    for path in links:
        try:
            _detach_link(path)
        except OSError as error:
            problems.append(error)
    try:
        _detach_links_of(programs)
    except OSError as error:
        problems.append(error)
    if problems:
        raise problems[0]
    return Removed(pins=len(links), filters=filters)


def remove_everything(installation: pins.Pins) -> Removed:
    """As `detach_everything`, and unpin programs and maps."""
    detached = detach_everything(installation)
    return Removed(detached.pins + installation.remove_everything(), detached.filters)


def remains(installation: pins.Pins) -> list[str]:
    """Names of the links that are pinned, of any version."""
    return sorted(os.path.basename(path) for path in installation.root.glob("v*/links/*"))


def _detach_link(path: pathlib.Path) -> None:
    # One that vanishes meanwhile, or that the kernel detaches by its last pin only.
    with contextlib.suppress(errors.BpfError), pins.opened(path) as link_fd:
        syscalls.link_detach(link_fd)
    pins.unlink_quietly(path)


def _pinned_programs(installation: pins.Pins) -> set[int]:
    """Ids of all programs that are pinned, of any version."""
    found = set()
    for path in installation.root.glob("v*/progs/**/*"):
        # One that vanishes meanwhile.
        with contextlib.suppress(errors.BpfError):
            if path.is_file():
                with pins.opened(path) as fd:
                    found.add(syscalls.program_id(fd))
    return found


def _detach_links_of(programs: set[int]) -> None:
    """Detach links without a pin: an agent that hangs may have created one, and not pinned it yet.

    Raises `BpfError`.
    """
    link_id = syscalls.next_id(syscalls.Command.LINK_GET_NEXT_ID, 0)
    while link_id is not None:
        # One that is gone meanwhile, not attached yet, or of a kind that cannot be detached.
        with contextlib.suppress(errors.BpfError):
            fd = syscalls.fd_by_id(syscalls.Command.LINK_GET_FD_BY_ID, link_id)
            try:
                if syscalls.link_program_id(fd) in programs:
                    syscalls.link_detach(fd)
            finally:
                os.close(fd)
        link_id = syscalls.next_id(syscalls.Command.LINK_GET_NEXT_ID, link_id)


def _program_of(path: pathlib.Path) -> str:
    """The program that a pinned link runs, by the name of its pin."""
    return _LINK_SUFFIX.sub("", path.name, count=1)


def _comes_later(path: pathlib.Path) -> bool:
    return path.name.startswith(program_specs.GATE_INGRESS)

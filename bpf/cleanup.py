"""Removal of what other versions of podgate left in the kernel, or of everything. It needs no
programs and no readable maps."""

import contextlib
import dataclasses
import os
import pathlib
import re

from bpf import abi, clsact, errors, pins, syscalls

_PROGRAMS = {*abi.PROGRAMS, *(hook.name for hook in abi.OPTIONAL_PROGRAMS)}
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

    Raises `AttachError`, or `OSError` when a pin cannot be removed.
    """
    filters = 0
    # Egress first: while it enforces, ingress must record the pod's flows.
    for parent in (clsact.EGRESS, clsact.INGRESS):
        with contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent)) as found:
            for ifindex in set().union(*found.refresh()):
                found.detach(ifindex)
                filters += 1
    links = sorted(installation.root.glob("v*/links/*"), key=_comes_later)
    for path in links:
        _detach_link(path)
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


def _program_of(path: pathlib.Path) -> str:
    """The program that a pinned link runs, by the name of its pin."""
    return _LINK_SUFFIX.sub("", path.name, count=1)


def _comes_later(path: pathlib.Path) -> bool:
    return path.name.startswith(abi.GATE_INGRESS)

"""Removal of everything that any version of podgate left in the kernel. It needs no programs and no
readable maps."""

import contextlib
import dataclasses
import os
import pathlib

from bpf import abi, clsact, errors, pins, syscalls


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """Numbers of removed objects."""

    pins: int
    filters: int


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
        # One that vanishes meanwhile, or that the kernel detaches by its last pin only.
        with contextlib.suppress(errors.BpfError), pins.opened(path) as link_fd:
            syscalls.link_detach(link_fd)
        pins.unlink_quietly(path)
    return Removed(pins=len(links), filters=filters)


def remove_everything(installation: pins.Pins) -> Removed:
    """As `detach_everything`, and unpin programs and maps."""
    detached = detach_everything(installation)
    return Removed(detached.pins + installation.remove_everything(), detached.filters)


def remains(installation: pins.Pins) -> list[str]:
    """Names of the links that are pinned, of any version."""
    return sorted(os.path.basename(path) for path in installation.root.glob("v*/links/*"))


def _comes_later(path: pathlib.Path) -> bool:
    return path.name.startswith(abi.GATE_INGRESS)

"""Removal of everything that any version of podgate left in the kernel."""

import contextlib
import dataclasses

from bpf import clsact, pins


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """Numbers of removed objects."""

    pins: int
    filters: int


def remove_everything(installation: pins.Pins) -> Removed:
    """Detach every gate of the calling thread's namespace and unpin everything.

    Works without programs or readable maps. Raises `AttachError`, or `OSError` when a pin cannot
    be removed.
    """
    filters = 0
    # Egress first: while it enforces, ingress must record the pod's flows.
    for parent in (clsact.EGRESS, clsact.INGRESS):
        with contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent)) as found:
            for ifindex in set().union(*found.refresh()):
                found.detach(ifindex)
                filters += 1
    return Removed(pins=installation.remove_everything(), filters=filters)

"""Removing all that podgate ever left in the kernel, whatever version left it."""

import contextlib
import dataclasses

from bpf import clsact, pins


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """How many of each were found and removed."""

    pins: int
    filters: int


def remove_everything(installation: pins.Pins) -> Removed:
    """Detach every gate of the calling namespace and unpin everything.

    Works without programs or readable maps. Raises `AttachError`, or `OSError` when a pin cannot
    be removed.
    """
    filters = 0
    # Egress first: as long as it judges, what the pod asks must be remembered.
    for parent in (clsact.EGRESS, clsact.INGRESS):
        with contextlib.closing(clsact.ClsactFilters(installation, "", -1, parent)) as found:
            for ifindex in set().union(*found.look()):
                found.detach(ifindex)
                filters += 1
    return Removed(pins=installation.remove_everything(), filters=filters)

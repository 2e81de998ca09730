"""Removing all that podgate ever left in the kernel, whatever version left it."""

import contextlib
import dataclasses
import struct

from bpf import abi, clsact, errors, maps, pins

_KEY = struct.Struct("=I")


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
    made_qdiscs = _made_qdiscs(installation)
    filters = 0
    # Egress last: the qdisc goes with its last filter.
    for parent in (clsact.INGRESS, clsact.EGRESS):
        with contextlib.closing(clsact.ClsactFilters("", -1, parent)) as ours:
            attached = ours.attached()
            filters += len(attached)
            for ifindex in attached | made_qdiscs:
                is_last = parent == clsact.EGRESS
                ours.detach(ifindex, remove_qdisc=is_last and ifindex in made_qdiscs)
    return Removed(pins=installation.remove_everything(), filters=filters)


def _made_qdiscs(installation: pins.Pins) -> set[int]:
    """Interfaces on which the clsact qdisc is ours to remove, as far as that can still be told."""
    try:
        with maps.Map.open(installation.map(abi.GATES), abi.GATES) as gates:
            return {
                _KEY.unpack(key)[0]
                for key, value in gates.items()
                if abi.Gate.from_buffer_copy(value).made_qdisc
            }
    except (errors.PinError, errors.BpfError):
        return set()

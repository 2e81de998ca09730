"""Programs on the node's own interfaces: bridges of pods, the loopback, where tunnels would let the
node's packets in by another door, and relays' pairs, which are for the node alone.

All methods wait for the kernel's RTNL lock: call them from the thread that installs gates.
"""

import errno

from bpf import abi, errors, loader, pins
from bpf.attachments import Attachment, Attachments, Direction

LOOPBACK_IFINDEX = 1
"""In every network namespace."""


class HostDevicePrograms:
    """What hangs on interfaces of the node that are no pod's."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment
    ) -> None:
        self._bridges, self._tunnels, self._pairs = (
            Attachments(installation, program, loaded.copies(program), direction, attachment)
            for program, direction in (
                (abi.BRIDGE_GATE, Direction.EGRESS),
                (abi.TUNNEL_GATE, Direction.INGRESS),
                (abi.DROP_FORWARDED, Direction.EGRESS),
            )
        )

    def close(self) -> None:
        self._bridges.close()
        self._tunnels.close()
        self._pairs.close()

    @property
    def other_interfaces(self) -> set[int]:
        """Interfaces that another schema's programs guard: not looked at yet since the start."""
        return (
            self._bridges.other_interfaces
            | self._tunnels.other_interfaces
            | self._pairs.other_interfaces
        )

    def ensure_bridges(self, wanted: set[int], *, are_all: bool = True) -> None:
        """Have these bridges judge what they may flood, and no others.

        are_all: False while more may be wanted than is known so far; then none is let go.

        Raises `AttachError`; a bridge that has just gone is no error.
        """
        self._bridges.refresh()
        if are_all:
            for ifindex in (self._bridges.attached | self._bridges.other_interfaces) - wanted:
                self._bridges.detach(ifindex)
        for ifindex in wanted:
            _attach(self._bridges, ifindex)

    def ensure_pairs(self, wanted: set[int]) -> None:
        """Have nothing forwarded towards the relays behind these interfaces, the node's ends.

        Raises `AttachError`.
        """
        self._pairs.refresh()
        for ifindex in (self._pairs.attached | self._pairs.other_interfaces) - wanted:
            self._pairs.detach(ifindex)
        for ifindex in wanted:
            _attach(self._pairs, ifindex)

    def ensure_tunnels(self, *, are_guarded: bool) -> None:
        """Whether what is wrapped for the node's own tunnels is refused at the loopback.

        Raises `AttachError`.
        """
        self._tunnels.refresh()
        if are_guarded:
            _attach(self._tunnels, LOOPBACK_IFINDEX)
        elif LOOPBACK_IFINDEX in self._tunnels.attached | self._tunnels.other_interfaces:
            self._tunnels.detach(LOOPBACK_IFINDEX)


def _attach(where: Attachments, ifindex: int) -> None:
    try:
        where.attach(ifindex)
    except errors.BpfError as error:
        if error.errno != errno.ENODEV:  # gone a moment ago
            raise errors.AttachError(f"guarding interface {ifindex}: {error}") from error

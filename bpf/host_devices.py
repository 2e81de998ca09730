"""Programs on host devices: bridges of pods; the loopback, by which host packets could reach pods
through tunnels; and relays' veth pairs, which only the host may use.

All methods wait for the kernel's RTNL lock: call them from the thread that installs gates.
"""

import errno

from bpf import abi, errors, loader, pins
from bpf.attachments import Attachment, Attachments, Direction

LOOPBACK_IFINDEX = 1
"""In every network namespace."""


class HostDevicePrograms:
    """The programs attached to host devices."""

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
        """Interfaces that still have another schema's programs."""
        return (
            self._bridges.other_interfaces
            | self._tunnels.other_interfaces
            | self._pairs.other_interfaces
        )

    def ensure_bridges(self, desired: set[int], *, are_all: bool = True) -> None:
        """Attach the bridge gate to these bridges, and detach it from others.

        are_all: False while `desired` may be incomplete; then it is detached from none.

        Raises `AttachError`; a bridge that was just deleted is no error.
        """
        self._bridges.refresh()
        if are_all:
            for ifindex in (self._bridges.attached | self._bridges.other_interfaces) - desired:
                self._bridges.detach(ifindex)
        for ifindex in desired:
            _attach(self._bridges, ifindex)

    def ensure_pairs(self, desired: set[int]) -> None:
        """Drop packets forwarded to the relays behind these interfaces, the host's ends.

        Raises `AttachError`.
        """
        self._pairs.refresh()
        for ifindex in (self._pairs.attached | self._pairs.other_interfaces) - desired:
            self._pairs.detach(ifindex)
        for ifindex in desired:
            _attach(self._pairs, ifindex)

    def ensure_tunnels(self, *, are_guarded: bool) -> None:
        """Attach the tunnel gate to the loopback, or detach it.

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
        if error.errno != errno.ENODEV:  # just deleted
            raise errors.AttachError(f"cannot attach to interface {ifindex}: {error}") from error

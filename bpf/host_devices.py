"""Programs on host devices, by which the host's packets could reach pods past their gates: bridges
of pods, veth pairs within the host, uplinks, tuns and the like; the loopback, also for its tunnels;
and relays' veth pairs, which only the host may use.

All methods wait for the kernel's RTNL lock: call them from the thread that installs gates.
"""

import errno
import functools
from collections.abc import Collection, Mapping

from bpf import cleanup, errors, loader, pins, program_specs
from bpf.attachment import Attachment
from bpf.attachments import Attachments, Direction

LOOPBACK_IFINDEX = 1
"""In every network namespace."""

# A link takes 15 ms, under RTNL, and a filter less than one: of fewer interfaces the last one waits
# less for the others' links than the agent waits for more interfaces.
_MANY = 4
# At a time: others wait for RTNL meanwhile.
_SETTLED_AT_ONCE = 8


class HostDevicePrograms:
    """The programs attached to host devices. What needs a deferrable one loads it first
    (`loader.load_deferred`).

    The methods raise `AttachError`; a device that was just deleted is no error. are_all: False
    while `desired` may be incomplete; then no program is detached.
    """

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment
    ) -> None:
        self._installation = installation
        self._all = {
            program: Attachments(
                installation,
                program,
                functools.partial(loaded.copies, program),
                direction,
                attachment,
            )
            for program, direction in (
                (program_specs.BRIDGE_GATE, Direction.EGRESS),
                (program_specs.DEVICE_GATE, Direction.EGRESS),
                (program_specs.UPLINK_GATE, Direction.EGRESS),
                (program_specs.BARE_DEVICE_GATE, Direction.EGRESS),
                (program_specs.HAND_MADE_GATE, Direction.EGRESS),
                (program_specs.STAMP_SPOOFED, Direction.INGRESS),
                (program_specs.TUNNEL_GATE, Direction.INGRESS),
                (program_specs.DROP_FORWARDED, Direction.EGRESS),
            )
        }

    def close(self) -> None:
        for program in self._all.values():
            program.close()

    def other_interfaces(self) -> set[int]:
        """Interfaces that still have another schema's programs, as the kernel has them now."""
        for program in self._all.values():
            program.refresh()
        return set().union(*(program.other_interfaces for program in self._all.values()))

    def ensure_bridges(self, desired: set[int], *, are_all: bool = True) -> None:
        """Attach the bridge gate to these bridges, and detach it from others.

        As the next five methods, it attaches filters instead of links where many interfaces have
        no program; `settle` makes links of them.
        """
        self._ensure(program_specs.BRIDGE_GATE, desired, are_all=are_all, may_hurry=True)

    def ensure_devices(self, desired: set[int], *, are_all: bool = True) -> None:
        """Attach the device gate to these devices, and detach it from others."""
        self._ensure(program_specs.DEVICE_GATE, desired, are_all=are_all, may_hurry=True)

    def ensure_uplinks(self, desired: set[int], *, are_all: bool = True) -> None:
        """Attach the uplinks' gate to these devices, and detach it from others."""
        self._ensure(program_specs.UPLINK_GATE, desired, are_all=are_all, may_hurry=True)

    def ensure_bare_devices(self, desired: set[int], *, are_all: bool = True) -> None:
        """As `ensure_devices`, of devices whose frames have no Ethernet header."""
        self._ensure(program_specs.BARE_DEVICE_GATE, desired, are_all=are_all, may_hurry=True)

    def ensure_hand_made(self, desired: set[int], *, are_all: bool = True) -> None:
        """Guard these interfaces, and no others, against what a process has written header by
        header."""
        self._ensure(program_specs.HAND_MADE_GATE, desired, are_all=are_all, may_hurry=True)

    def ensure_spoofed(self, desired: set[int], *, are_all: bool = True) -> None:
        """Stamp what comes from these tuns in the name of hosts elsewhere, and no longer from
        others."""
        self._ensure(program_specs.STAMP_SPOOFED, desired, are_all=are_all, may_hurry=True)

    def ensure_pairs(self, desired: set[int]) -> None:
        """Drop packets forwarded to the relays behind these interfaces, the host's ends."""
        self._ensure(program_specs.DROP_FORWARDED, desired)

    def ensure_tunnels(self, *, are_guarded: bool) -> None:
        """Attach the tunnel gate to the loopback, or detach it."""
        self._ensure(program_specs.TUNNEL_GATE, {LOOPBACK_IFINDEX} if are_guarded else set())

    def lost(self, changed: Collection[int] | None) -> dict[str, frozenset[int]]:
        """By program, the devices from which another process removed it. changed: those whose
        filters may have changed, None for all. Raises `BpfError`."""
        found = {name: one.check(changed).lost for name, one in self._all.items() if one.expected}
        return {name: interfaces for name, interfaces in found.items() if interfaces}

    def put_back(self, lost: Mapping[str, Collection[int]]) -> dict[int, str]:
        """Attach again what `lost` has found. By device: why it cannot be, or "" if it is."""
        found: dict[int, str] = {}
        for name, interfaces in lost.items():
            for ifindex in interfaces:
                try:
                    self._all[name].put_back(ifindex)
                except errors.KernelSideError as error:
                    found[ifindex] = str(error)
                else:
                    found.setdefault(ifindex, "")
        return found

    def detach_unknown(self) -> list[str]:
        """As `cleanup.detach_unknown`: programs of other versions, also of gates."""
        return cleanup.detach_unknown(self._installation)

    def settle(self, *, is_calm: bool) -> bool:
        """Make links of filters that were attached in a hurry, some at a time, if no more
        interfaces come. Whether none is left."""
        left = _SETTLED_AT_ONCE if is_calm else 0
        is_settled = True
        for attachments in self._all.values():
            if not attachments.unlinked:
                continue
            attachments.refresh()
            for ifindex in sorted(attachments.unlinked)[:left]:
                _attach(attachments, ifindex)
                left -= 1
            is_settled = is_settled and not attachments.unlinked
        return is_settled

    def _ensure(
        self, program: str, desired: set[int], *, are_all: bool = True, may_hurry: bool = False
    ) -> None:
        """Attach first: an interface may get one program for another."""
        attachments = self._all[program]
        attachments.refresh()
        unlinked = attachments.unlinked
        are_many = len(desired - attachments.attached) >= _MANY
        for ifindex in desired:
            _attach(attachments, ifindex, quickly=may_hurry and (are_many or ifindex in unlinked))
        if are_all:
            for ifindex in (attachments.attached | attachments.other_interfaces) - desired:
                attachments.detach(ifindex)


def _attach(where: Attachments, ifindex: int, *, quickly: bool = False) -> None:
    try:
        where.attach(ifindex, quickly=quickly)
    except errors.BpfError as error:
        if error.errno != errno.ENODEV:  # just deleted
            raise errors.AttachError(f"cannot attach to interface {ifindex}: {error}") from error

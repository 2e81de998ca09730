"""Attaching by tcx links (Linux 6.6), pinned so that they outlive the agent.

Every call that attaches waits for RCU under RTNL, about 10 ms: worker threads only.
"""

import contextlib
import errno
import os
import struct

from bpf import errors, pins, syscalls

# `struct bpf_link_info`: type, id, prog_id, (padding,) then for tcx: ifindex, attach_type
_LINK_INFO = struct.Struct("=IIIIII")


class TcxLinks:
    """The links of one program at interfaces of the calling namespace."""

    def __init__(
        self, installation: pins.Pins, program: str, program_fd: int, attach_type: int
    ) -> None:
        """attach_type: BPF_TCX_EGRESS or BPF_TCX_INGRESS."""
        self._pins = installation
        self._attach_type = attach_type
        self._program = program
        self._program_fd = program_fd

    @staticmethod
    def is_supported() -> bool:
        """Found out by asking for the loopback's chain: EINVAL before Linux 6.6."""
        try:
            syscalls.query_programs(1, syscalls.BPF_TCX_EGRESS)
        except errors.BpfError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True

    def attach(self, ifindex: int) -> None:
        """Attach before whatever is attached already, or swap the program of the pinned link.

        BPF_F_BEFORE: a program of the CNI that returns TC_ACT_OK ends the chain, and an appended
        gate would never see the packet. Raises `BpfError` (ENODEV: no such interface).
        """
        path = self._pins.link(self._program, ifindex)
        if self._reuse(path, ifindex):
            return
        pins.unlink_quietly(path)
        link_fd = syscalls.link_create_tcx(
            self._program_fd, ifindex, self._attach_type, syscalls.BPF_F_BEFORE
        )
        try:
            syscalls.pin(link_fd, path)
        finally:
            os.close(link_fd)

    def detach(self, ifindex: int) -> None:
        """Detach and unpin the link: afterwards it judges nothing. Nothing happens without one."""
        path = self._pins.link(self._program, ifindex)
        if not os.path.lexists(path):
            return
        with contextlib.closing(_Link(path, self._attach_type)) as link:
            if link.ifindex:
                syscalls.link_detach(link.fd)
        pins.unlink_quietly(path)

    def attached(self) -> set[int]:
        """Interfaces that carry a live link. Pins of links whose interface is gone are removed."""
        alive = set()
        for ifindex in self._pins.linked_ifindexes(self._program):
            with contextlib.closing(self._open(ifindex)) as link:
                if link.ifindex == ifindex:
                    alive.add(ifindex)
                    continue
            self.detach(ifindex)
        return alive

    def _open(self, ifindex: int) -> "_Link":
        return _Link(self._pins.link(self._program, ifindex), self._attach_type)

    def _reuse(self, path: str, ifindex: int) -> bool:
        if not os.path.lexists(path):
            return False
        with contextlib.closing(_Link(path, self._attach_type)) as link:
            if link.ifindex != ifindex:
                return False
            program_id = syscalls.program_id(self._program_fd)
            if link.program_id != program_id:
                syscalls.link_update(link.fd, self._program_fd)
            return True


class _Link:
    """An opened pin. `ifindex` is 0 when the interface is gone, or for another kind of link."""

    def __init__(self, path: str, expected_type: int) -> None:
        self.fd = syscalls.open_pin(path)
        kind, _, self.program_id, _, ifindex, attach_type = _LINK_INFO.unpack(
            syscalls.object_info(self.fd, _LINK_INFO.size)
        )
        is_expected = (kind, attach_type) == (syscalls.BPF_LINK_TYPE_TCX, expected_type)
        self.ifindex = ifindex if is_expected else 0

    def close(self) -> None:
        os.close(self.fd)

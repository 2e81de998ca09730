"""Attaching by tcx links (Linux 6.6), pinned so that they outlive the agent.

Every call that attaches waits for RCU under RTNL, about 10 ms: worker threads only.
"""

import contextlib
import errno
import os
import pathlib
import struct
import time

from bpf import errors, pins, syscalls

# What somebody else has attached is pinned by him a moment later.
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.02

# `struct bpf_link_info`: type, id, prog_id, (padding,) then for tcx: ifindex, attach_type
_LINK_INFO = struct.Struct("=IIIIII")


class TcxLinks:
    """The links of one program at interfaces of the calling namespace."""

    def __init__(
        self, installation: pins.Pins, program: str, copies: tuple[int, int], attach_type: int
    ) -> None:
        """copies: the program's descriptor, and that of its spare.

        attach_type: BPF_TCX_EGRESS or BPF_TCX_INGRESS.
        """
        self._pins = installation
        self._attach_type = attach_type
        self._program = program
        self._copies = copies
        self._ids = [syscalls.program_id(fd) for fd in copies]

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
        """Attach before whatever is attached already, or swap the program of a pinned link.

        BPF_F_BEFORE: a program of the CNI that returns TC_ACT_OK ends the chain, and an appended
        gate would never see the packet. A link of another schema is taken over: at each moment
        either version's program judges, by its own maps. Raises `BpfError` (ENODEV: no such
        interface).

        podgate-cni may do the same at the same time: whose link is pinned is the one that stays.
        """
        path = self._pins.link(self._program, ifindex)
        for attempt in range(_ATTEMPTS):
            if self._take_over(ifindex):
                return
            try:
                os.close(self._attach_first(self._copies[0], ifindex, path))
            except errors.BpfError as error:
                if error.errno != errno.EEXIST or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def is_attached(self, ifindex: int) -> bool:
        """Whether a link of this schema stands, whoever made it."""
        path = self._pins.link(self._program, ifindex)
        try:
            with contextlib.closing(_Link(path, self._attach_type)) as link:
                return link.ifindex == ifindex
        except errors.BpfError as error:
            if error.errno == errno.ENOENT:
                return False
            raise

    def detach(self, ifindex: int) -> None:
        """Detach and unpin, whichever version attached: afterwards nothing of ours judges."""
        for path in self._paths(ifindex):
            self._detach(path)

    def refresh(self) -> tuple[set[int], set[int]]:
        """Interfaces that carry a live link: of this schema, and of others.

        Pins of links whose interface is gone are removed on the way.
        """
        ours = self._alive(self._pins.schema)
        others = set().union(*map(self._alive, self._pins.other_schemas()))
        return ours, others - ours

    def is_first(self, ifindex: int) -> bool:
        """Whether nobody's program runs before ours. Raises `BpfError` (ENODEV)."""
        chain = syscalls.query_programs(ifindex, self._attach_type)
        return bool(chain) and chain[0] in self._ids

    def move_first(self, ifindex: int) -> None:
        """Put an attached program before all others, without a gap.

        A program can be in a chain only once (EEXIST), so its spare goes in at the front, takes the
        pin, and then the link that stood behind goes. Ended in between, both stay, and both judge
        alike. Raises `BpfError`.
        """
        path = self._pins.link(self._program, ifindex)
        pins.unlink_quietly(path + pins.MOVING)
        with contextlib.closing(_Link(path, self._attach_type)) as behind:
            spare = self._copies[1 if behind.program_id == self._ids[0] else 0]
            front = self._attach_first(spare, ifindex, path + pins.MOVING)
            try:
                os.rename(path + pins.MOVING, path)
                syscalls.link_detach(behind.fd)
            finally:
                os.close(front)

    def _attach_first(self, program_fd: int, ifindex: int, path: str) -> int:
        """The descriptor of a new link, pinned at `path`."""
        link_fd = syscalls.link_create_tcx(
            program_fd, ifindex, self._attach_type, syscalls.BPF_F_BEFORE
        )
        try:
            syscalls.pin(link_fd, path)
        except BaseException:
            os.close(link_fd)
            raise
        return link_fd

    def _take_over(self, ifindex: int) -> bool:
        """Have one living link run our program, and detach any other; whether there was one.

        The program first and then the pin: a process that ends in between leaves a link that the
        next one, of either version, finds and takes over again.
        """
        own = self._name(ifindex)
        is_done = False
        for path in self._paths(ifindex):
            with contextlib.closing(_Link(path, self._attach_type)) as link:
                if is_done or link.ifindex != ifindex:
                    self._detach(path)
                    continue
                if link.program_id not in self._ids:
                    syscalls.link_update(link.fd, self._copies[0])
                self._pins.adopt(path, own)
                is_done = True
        return is_done

    def _paths(self, ifindex: int) -> list[pathlib.Path]:
        """Every pin of a link to this interface, ours first."""
        name = self._name(ifindex)
        return self._pins.find_links(name) + self._pins.find_links(name + pins.MOVING)

    def _name(self, ifindex: int) -> str:
        return os.path.basename(self._pins.link(self._program, ifindex))

    def _alive(self, schema: pathlib.Path) -> set[int]:
        alive = set()
        for ifindex in self._pins.linked_ifindexes(self._program, schema):
            for path in self._paths(ifindex):
                if not path.is_relative_to(schema):
                    continue
                with contextlib.closing(_Link(path, self._attach_type)) as link:
                    if link.ifindex == ifindex:
                        alive.add(ifindex)
                        continue
                self._detach(path)
        return alive

    def _detach(self, path: pathlib.Path) -> None:
        with contextlib.closing(_Link(path, self._attach_type)) as link:
            if link.ifindex:
                syscalls.link_detach(link.fd)
        pins.unlink_quietly(path)


class _Link:
    """An opened pin. `ifindex` is 0 when the interface is gone, or for another kind of link."""

    def __init__(self, path: str | os.PathLike[str], expected_type: int) -> None:
        self.fd = syscalls.open_pin(str(path))
        kind, _, self.program_id, _, ifindex, attach_type = _LINK_INFO.unpack(
            syscalls.object_info(self.fd, _LINK_INFO.size)
        )
        is_expected = (kind, attach_type) == (syscalls.BPF_LINK_TYPE_TCX, expected_type)
        self.ifindex = ifindex if is_expected else 0

    def close(self) -> None:
        os.close(self.fd)

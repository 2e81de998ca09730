"""Attachment by tcx links (Linux 6.6), pinned so that they outlive the agent.

Every call that attaches waits for RCU under RTNL, about 10 ms: worker threads only.
"""

import contextlib
import errno
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from bpf import errors, pins, syscalls

# Another process (podgate-cni) pins its new link a moment after attaching it.
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.02

# `struct bpf_link_info`: type, id, prog_id, (padding,) then for tcx: ifindex, attach_type
_LINK_INFO = struct.Struct("=IIIIII")


class TcxLinks:
    """The links of one program on interfaces of the calling thread's namespace."""

    def __init__(
        self,
        installation: pins.Pins,
        program: str,
        copies: Callable[[], Sequence[int]],
        attach_type: int,
    ) -> None:
        """copies: the program's descriptor, and that of its moving copy once it is loaded.

        attach_type: BPF_TCX_EGRESS or BPF_TCX_INGRESS.
        """
        self._pins = installation
        self._attach_type = attach_type
        self._program = program
        self._copies = copies
        self._cached_ids: list[int] = []

    @staticmethod
    def is_supported() -> bool:
        """Detected by querying the loopback's chain: EINVAL before Linux 6.6."""
        try:
            syscalls.query_programs(1, syscalls.BPF_TCX_EGRESS)
        except errors.BpfError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True

    def attach(self, ifindex: int) -> None:
        """Attach before all other programs, or replace the program of a pinned link.

        BPF_F_BEFORE: a program of the CNI that returns TC_ACT_OK ends the chain, and an appended
        gate would never see the packet. A link of another schema is taken over: at each moment one
        version's program enforces, by its own maps. Raises `BpfError` (ENODEV: no such interface).

        podgate-cni may do the same at the same time: the link that is pinned stays.
        """
        path = self._pins.link(self._program, ifindex)
        for attempt in range(_ATTEMPTS):
            if self._take_over(ifindex):
                return
            try:
                os.close(self._attach_first(self._copies()[0], ifindex, path))
            except errors.BpfError as error:
                if error.errno != errno.EEXIST or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def attach_again(self, ifindex: int) -> None:
        """As `attach` where there is no link, or only the pin of one that is detached: without a
        look for links that could be taken over."""
        try:
            path = self._pins.link(self._program, ifindex)
            os.close(self._attach_first(self._copies()[0], ifindex, path))
        except errors.BpfError as error:
            if error.errno != errno.EEXIST:
                raise
            self.attach(ifindex)

    def is_attached(self, ifindex: int) -> bool:
        """Whether a link of this schema is attached, whichever process created it."""
        path = self._pins.link(self._program, ifindex)
        with self._opened(path) as link:
            return link is not None and link.ifindex == ifindex

    def detach(self, ifindex: int) -> None:
        """Detach and unpin all links of any version."""
        for path in self._paths(ifindex):
            self._detach(path)

    def refresh(self) -> tuple[set[int], set[int]]:
        """Interfaces that have a live link: of this schema, and of others.

        Also removes pins of links whose interface is deleted.
        """
        ours = self._alive(self._pins.schema)
        others = set().union(*map(self._alive, self._pins.other_schemas()))
        return ours, others - ours

    def is_first(self, ifindex: int) -> bool:
        """Whether no other program runs before ours. Raises `BpfError` (ENODEV)."""
        chain = syscalls.query_programs(ifindex, self._attach_type)
        return bool(chain) and chain[0] in self._ids

    def is_ours(self, program_id: int) -> bool:
        """Whether it is this program, or its moving copy."""
        return program_id in self._ids

    def move_first(self, ifindex: int) -> None:
        """Move an attached program before all others, without a gap.

        A program can be in a chain only once (EEXIST), so its moving copy is attached first and
        pinned, and then the old link is detached. If the process ends in between, both stay
        attached, and both decide alike. Raises `BpfError`, or `AttachError` unless the moving copy
        is loaded.
        """
        path = self._pins.link(self._program, ifindex)
        copies = self._copies()
        if len(copies) < 2:
            raise errors.AttachError(f"the moving copy of {self._program} is not loaded")
        pins.unlink_quietly(path + pins.MOVING)
        with contextlib.closing(_Link(path, self._attach_type)) as displaced:
            copy = copies[1 if displaced.program_id == self._ids[0] else 0]
            front = self._attach_first(copy, ifindex, path + pins.MOVING)
            try:
                os.rename(path + pins.MOVING, path)
                syscalls.link_detach(displaced.fd)
            finally:
                os.close(front)

    @property
    def _ids(self) -> list[int]:
        copies = self._copies()
        if len(copies) != len(self._cached_ids):
            self._cached_ids = [syscalls.program_id(fd) for fd in copies]
        return self._cached_ids

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
        """Make one live link run our program, and detach all others. Whether there was one.

        The program first and then the pin: if the process ends in between, the next one, of either
        version, finds the link and takes it over again.
        """
        own = self._name(ifindex)
        is_done = False
        for path in self._paths(ifindex):
            with self._opened(path) as link:
                if link is None:
                    continue
                if is_done or link.ifindex != ifindex:
                    self._detach(path)
                    continue
                if link.program_id not in self._ids:
                    syscalls.link_update(link.fd, self._copies()[0])
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
                with self._opened(path) as link:
                    if link and link.ifindex == ifindex:
                        alive.add(ifindex)
                        continue
                self._detach(path)
        return alive

    def _detach(self, path: pathlib.Path) -> None:
        with self._opened(path) as link:
            if link and link.ifindex:
                syscalls.link_detach(link.fd)
        pins.unlink_quietly(path)

    @contextlib.contextmanager
    def _opened(self, path: str | pathlib.Path) -> Iterator["_Link | None"]:
        """None for a pin that does not exist, as when `podgate off` or podgate-cni has removed it
        meanwhile. Raises `BpfError`."""
        try:
            link = _Link(path, self._attach_type)
        except errors.BpfError as error:
            if error.errno != errno.ENOENT:
                raise
            yield None
            return
        with contextlib.closing(link):
            yield link


class _Link:
    """An opened pin. `ifindex` is 0 if the interface is deleted, or for another kind of link."""

    def __init__(self, path: str | os.PathLike[str], expected_type: int) -> None:
        self.fd = syscalls.open_pin(str(path))
        kind, _, self.program_id, _, ifindex, attach_type = _LINK_INFO.unpack(
            syscalls.object_info(self.fd, _LINK_INFO.size)
        )
        is_expected = (kind, attach_type) == (syscalls.BPF_LINK_TYPE_TCX, expected_type)
        self.ifindex = ifindex if is_expected else 0

    def close(self) -> None:
        os.close(self.fd)

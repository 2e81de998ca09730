"""Attachment by a filter on a clsact qdisc: where tcx is missing (before Linux 6.6), or for speed.

0.1 ms per interface instead of tcx's 10, but any process that may configure the interface can
remove the filter, and it runs after all tcx programs.

A filter's name stores what must outlive the agent and its maps: the schema of the maps that it
uses, and the program.

The qdisc stays when the filter goes. While the kernel adds or removes one, it deactivates the
interface for a grace period of RCU and drops all that is sent there, pods' packets included
(`qdisc_graft` calls `dev_deactivate`, up to 6.18 at least): 0.4 s on a busy machine. Empty, it runs
nothing, and it ends with the interface.
"""

import dataclasses
import errno
import socket
import struct
from collections.abc import Iterator

from bpf import errors, netlink, pins, syscalls
from bpf.netlink import NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkError

# TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS), and _EGRESS
INGRESS = 0xFFFFFFF2
EGRESS = 0xFFFFFFF3
_QDISC_PARENT = 0xFFFFFFF1  # TC_H_CLSACT, which is TC_H_INGRESS
_QDISC_HANDLE = 0xFFFF0000
# Priority 1 is the first. Others use it too (Cilium's legacy mode): cls_bpf puts a new filter at
# the head of its priority's list (cls_bpf_change), and the handles identify ours: a relay's pair
# has two programs, and each may have two filters for a moment while it moves.
_PRIORITY = 1
_HANDLES = (0x706F6467, 0x706F6468, 0x706F6469, 0x706F646A)  # "podg", "podh", ...
_NAME_PREFIX = "podgate/"

# include/uapi/linux/rtnetlink.h and pkt_cls.h
_RTM_NEWQDISC, _RTM_GETQDISC = 36, 38
_RTM_NEWTFILTER, _RTM_DELTFILTER, _RTM_GETTFILTER = 44, 45, 46
_TCMSG = struct.Struct("=BxxxiIII")  # family, interface, handle, parent, info
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TCA_BPF_FD, _TCA_BPF_NAME, _TCA_BPF_FLAGS, _TCA_BPF_ID = 6, 7, 8, 11
_TCA_BPF_FLAG_ACT_DIRECT = 1
_U32 = struct.Struct("=I")
_TCA_AT = netlink.HEADER_BYTES + _TCMSG.size
_FILTER_INFO = _PRIORITY << 16 | socket.htons(0x0003)  # ETH_P_ALL


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """One BPF filter; `name` is "" for filters of other kinds."""

    handle: int
    name: str
    program_id: int | None

    @property
    def is_ours(self) -> bool:
        """Whether any version of podgate created it."""
        return self.name.startswith(_NAME_PREFIX)

    @property
    def program(self) -> str:
        """The name of podgate's program that it runs, if it is ours."""
        return self.name.rpartition("/")[2].partition("+")[0]  # "+qdisc" of previous versions


class ClsactFilters:
    """The filters of one program on interfaces of the calling thread's namespace."""

    def __init__(self, installation: pins.Pins, program: str, program_fd: int, parent: int) -> None:
        """program: "" finds and removes filters of all programs; parent: EGRESS or INGRESS.
        program_fd: -1 while nothing is attached.
        """
        self._parent = parent
        self._program = program
        self._schema = f"{_NAME_PREFIX}{installation.schema.name}/"
        self._name = self._schema + program
        self.program_fd = program_fd
        self._netlink = netlink.RequestSocket()

    def close(self) -> None:
        self._netlink.close()

    def attach(self, ifindex: int) -> None:
        """Add our filter, or replace the program of any version's filter in one step.

        Raises `AttachError`.
        """
        try:
            if self._is_current(ifindex):
                return
            if self._add_qdisc(ifindex):  # which has no filter yet
                ours, handle = [], _HANDLES[0]
            else:
                ours = self._ours(ifindex)
                handle = ours[0].handle if ours else self._free_handle(ifindex)
            desired = Filter(handle, self._name, syscalls.program_id(self.program_fd))
            if desired not in ours[:1]:
                self._put(NLM_F_REPLACE, ifindex, desired)
            for duplicate in ours[1:]:
                self._delete(ifindex, duplicate)
        except NetlinkError as error:
            raise errors.AttachError(
                f"cannot attach a filter to interface {ifindex}: {error}"
            ) from error

    def detach(self, ifindex: int) -> None:
        """Remove our filter.

        No error if the interface is deleted: its filter went with it. Raises `AttachError`.
        """
        try:
            for entry in self._ours(ifindex):
                self._delete(ifindex, entry)
        except NetlinkError as error:
            if error.errno not in (errno.ENODEV, errno.ENOENT, errno.EINVAL):
                raise errors.AttachError(
                    f"cannot remove the filter of interface {ifindex}: {error}"
                ) from error

    def is_attached(self, ifindex: int) -> bool:
        """Whether a filter of this schema is attached, whichever process created it."""
        try:
            return any(entry.name.startswith(self._schema) for entry in self._ours(ifindex))
        except NetlinkError:  # no such interface, or no such qdisc
            return False

    def is_in_force(self, ifindex: int) -> bool:
        """Whether our filter runs this very program, as the kernel has it now."""
        return self._is_current(ifindex)

    def refresh(self) -> tuple[set[int], set[int]]:
        """Interfaces that have podgate's filter: of this schema, and of others."""
        ours, others = set(), set()
        for ifindex in self._clsact_ifindexes():
            names = [entry.name for entry in self._ours(ifindex)]
            if any(name.startswith(self._schema) for name in names):
                ours.add(ifindex)
            elif names:
                others.add(ifindex)
        return ours, others

    def programs(self) -> dict[int, set[str]]:
        """By interface, the programs of podgate's filters, whichever version created them."""
        found = {i: {one.program for one in self._ours(i)} for i in self._clsact_ifindexes()}
        return {ifindex: names for ifindex, names in found.items() if names}

    def chain(self, ifindex: int) -> list[Filter]:
        """All filters in the order in which they run, also other projects'; none without qdisc."""
        try:
            return list(self._filters(ifindex, self._parent))
        except NetlinkError:  # no such interface, or no such qdisc
            return []

    def is_first(self, ifindex: int) -> bool:
        """Whether no other filter runs before ours; programs attached by tcx always do.

        Raises `BpfError` (ENODEV).
        """
        try:
            first = next(self._filters(ifindex, self._parent), None)
        except NetlinkError as error:
            raise errors.BpfError(
                error.errno, f"cannot read the filters of interface {ifindex}: {error}"
            ) from error
        return first is not None and first.is_ours

    def is_behind_another(self, ifindex: int) -> bool:
        """Whether a filter of others runs before ours; False where ours is missing."""
        chain = self.chain(ifindex)
        return any(entry.is_ours for entry in chain) and not chain[0].is_ours

    def move_first(self, ifindex: int) -> None:
        """Move our filter before all others without a gap: add a second one, then remove the first.

        Raises `AttachError`.
        """
        try:
            ours = self._ours(ifindex)
            name = ours[0].name if ours else self._name
            self._put(NLM_F_EXCL, ifindex, Filter(self._free_handle(ifindex), name, None))
            for entry in ours:
                self._delete(ifindex, entry)
        except NetlinkError as error:
            raise errors.AttachError(
                f"cannot move the filter of interface {ifindex}: {error}"
            ) from error

    def order(self, ifindex: int) -> list[tuple[int | None, bool]]:
        """Filters in the order in which they run: the program, None for another kind of filter,
        and whether it is podgate's. Empty without a clsact qdisc, and without such an interface.
        """
        try:
            found = list(self._filters(ifindex, self._parent))
        except NetlinkError:
            return []
        return [(one.program_id, one.is_ours) for one in found]

    def _is_current(self, ifindex: int) -> bool:
        """Whether our filter is as `attach` leaves it, by one query instead of five."""
        try:
            ours = self._ours(ifindex)
        except NetlinkError:  # no qdisc
            return False
        desired = self._name, syscalls.program_id(self.program_fd)
        return len(ours) == 1 and (ours[0].name, ours[0].program_id) == desired

    def _put(self, flag: int, ifindex: int, desired: Filter) -> None:
        """flag: NLM_F_REPLACE, or NLM_F_EXCL for another one."""
        options = (
            netlink.attribute(_TCA_BPF_FD, _U32.pack(self.program_fd))
            + netlink.attribute(_TCA_BPF_NAME, desired.name.encode() + b"\0")
            + netlink.attribute(_TCA_BPF_FLAGS, _U32.pack(_TCA_BPF_FLAG_ACT_DIRECT))
        )
        body = (
            _TCMSG.pack(0, ifindex, desired.handle, self._parent, _FILTER_INFO)
            + netlink.attribute(_TCA_KIND, b"bpf\0")
            + netlink.attribute(_TCA_OPTIONS, options)
        )
        self._netlink.change(_RTM_NEWTFILTER, NLM_F_CREATE | flag, body)

    def _delete(self, ifindex: int, entry: Filter) -> None:
        body = _TCMSG.pack(0, ifindex, entry.handle, self._parent, _FILTER_INFO)
        body += netlink.attribute(_TCA_KIND, b"bpf\0")
        self._netlink.change(_RTM_DELTFILTER, 0, body)

    def _add_qdisc(self, ifindex: int) -> bool:
        """Whether there was none. Raises `AttachError` if there is one of another kind."""
        body = _TCMSG.pack(0, ifindex, _QDISC_HANDLE, _QDISC_PARENT, 0)
        body += netlink.attribute(_TCA_KIND, b"clsact\0")
        try:
            self._netlink.change(_RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body)
        except NetlinkError as error:
            if error.errno != errno.EEXIST:
                raise
            self._check_qdisc(ifindex)
            return False
        return True

    def _check_qdisc(self, ifindex: int) -> None:
        """Raise `AttachError` if another kind of qdisc is in the place of clsact.

        `ingress`, as the CNI plugin bandwidth adds it: there the kernel accepts an egress filter,
        and runs it at the ingress (`ingress_tcf_block` returns its only block for any parent).
        """
        for index, parent, kind in self._qdiscs():
            if (index, parent) == (ifindex, _QDISC_PARENT) and kind != "clsact":
                raise errors.AttachError(
                    f"interface {ifindex} has a qdisc {kind} where clsact is needed; replace it"
                )

    def _clsact_ifindexes(self) -> Iterator[int]:
        for index, _, kind in self._qdiscs():
            if kind == "clsact":
                yield index

    def _qdiscs(self) -> Iterator[tuple[int, int, str]]:
        """Interface, parent and kind of each."""
        for message in self._netlink.dump(_RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            _, ifindex, _, parent, _ = _TCMSG.unpack_from(message, netlink.HEADER_BYTES)
            values = netlink.attributes(message, _TCA_AT)
            yield ifindex, parent, netlink.text(values.get(_TCA_KIND, b""))

    def _ours(self, ifindex: int) -> list[Filter]:
        return [
            entry
            for entry in self._filters(ifindex, self._parent)
            if entry.is_ours and self._program in ("", entry.program)
        ]

    def _free_handle(self, ifindex: int) -> int:
        """A handle that no filter uses. Raises `AttachError`."""
        taken = {entry.handle for entry in self._filters(ifindex, self._parent)}
        for handle in _HANDLES:
            if handle not in taken:
                return handle
        raise errors.AttachError(
            f"interface {ifindex} has filters under all of podgate's handles "
            f"({', '.join(map(hex, _HANDLES))}); remove other filters with 'tc filter del'"
        )

    def _filters(self, ifindex: int, parent: int) -> Iterator[Filter]:
        """Filters in the order in which they run. Chain headers, which have no handle, are left
        out.
        """
        for message in self._netlink.dump(_RTM_GETTFILTER, _TCMSG.pack(0, ifindex, 0, parent, 0)):
            _, _, handle, _, _ = _TCMSG.unpack_from(message, netlink.HEADER_BYTES)
            if handle:
                values = netlink.attributes(message, _TCA_AT)
                is_bpf = values.get(_TCA_KIND) == b"bpf\0"
                options = netlink.attributes(values.get(_TCA_OPTIONS, b"")) if is_bpf else {}
                program_id = options.get(_TCA_BPF_ID)
                yield Filter(
                    handle,
                    netlink.text(options.get(_TCA_BPF_NAME, b"")),
                    _U32.unpack(program_id)[0] if program_id else None,
                )

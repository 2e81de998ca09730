"""One program's attachments to interfaces, by tcx or clsact."""

import dataclasses
import enum
from collections.abc import Callable, Collection, Container, Sequence

from bpf import clsact, errors, pins, syscalls, tcx
from bpf.attachment import Attachment


class Direction(enum.Enum):
    """Seen from the host: egress is towards the pod."""

    EGRESS = (syscalls.BPF_TCX_EGRESS, clsact.EGRESS)
    INGRESS = (syscalls.BPF_TCX_INGRESS, clsact.INGRESS)


@dataclasses.dataclass(frozen=True, slots=True)
class GateCheck:
    """What differs from what was attached, by ifindex. lost: the program is no longer attached;
    displaced: another one runs before it."""

    lost: frozenset[int]
    displaced: frozenset[int]

    def __or__(self, other: "GateCheck") -> "GateCheck":
        return GateCheck(self.lost | other.lost, self.displaced | other.displaced)


class Attachments:
    """Where one program is attached, in the calling thread's network namespace (the host's).

    Finds attachments of either type, whichever version made them.
    """

    def __init__(
        self,
        installation: pins.Pins,
        program: str,
        copies: Callable[[], Sequence[int]],
        direction: Direction,
        attachment: Attachment,
    ) -> None:
        """copies: the program's descriptor, and that of its moving copy, once they are loaded;
        `attach` needs the first."""
        self._attach_type, parent = direction.value
        self._attachment = attachment
        self._has_tcx = tcx.TcxLinks.is_supported()
        self._links = tcx.TcxLinks(installation, program, copies, self._attach_type)
        self._copies = copies
        self._filters = clsact.ClsactFilters(installation, program, -1, parent)
        self._linked: set[int] = set()
        self._filtered: set[int] = set()
        self.attached: set[int] = set()
        """Interfaces to which this schema's program is attached."""
        self.expected: set[int] = set()
        """Interfaces on which `attach` was called, until `detach`, whatever others remove."""
        self.refresh()

    def close(self) -> None:
        self._filters.close()

    @property
    def other_interfaces(self) -> set[int]:
        """Interfaces to which only another schema's program is attached."""
        return (self._linked | self._filtered) - self.attached

    def refresh(self) -> None:
        """Read from the kernel what is attached."""
        linked, other_links = self._links.refresh()
        filtered, other_filters = self._filters.refresh()
        self._linked = linked | other_links
        self._filtered = filtered | other_filters
        self.attached = linked | filtered

    def mark_attached(self, ifindex: int) -> bool:
        """Whether it is attached, also by another process (podgate-cni) since the last refresh."""
        if ifindex not in self.attached:
            if self._links.is_attached(ifindex):
                self._linked.add(ifindex)
                self.attached.add(ifindex)
            elif self._filters.is_attached(ifindex):
                self._filtered.add(ifindex)
                self.attached.add(ifindex)
        return ifindex in self.attached

    def is_in_chain(self, ifindex: int) -> bool:
        """Whether it is attached, as the kernel has it now. Raises `BpfError`."""
        return self._links.is_attached(ifindex) or self._filters.is_attached(ifindex)

    def check(self, changed: Container[int] | None) -> GateCheck:
        """Compare what should be attached with the kernel: 2 us for a link.

        changed: interfaces whose filters may have changed, None for all; a filter takes 0.1 to
        0.4 ms, and the kernel reports its changes, where those of links are silent. Raises
        `BpfError`.
        """
        chains = self._chains(self.expected)
        lost, displaced = set(), set()
        for ifindex in self.expected:
            if self._has_tcx and ifindex not in chains:
                continue  # deleted, with everything attached to it
            chain = chains.get(ifindex, [])
            if any(map(self._links.is_ours, chain)):
                if not self._links.is_ours(chain[0]):
                    displaced.add(ifindex)
                continue
            is_filter = ifindex in self._filtered
            if chain and self._attachment is Attachment.TCX:
                displaced.add(ifindex)
            is_unchanged = is_filter and changed is not None and ifindex not in changed
            if is_unchanged:
                continue
            if not self._filters.is_in_force(ifindex):
                lost.add(ifindex)
            elif self._filters.is_behind_another(ifindex):
                displaced.add(ifindex)
        return GateCheck(frozenset(lost), frozenset(displaced))

    def is_lost(self, ifindex: int) -> bool:
        """Whether the program should be attached, and is not, as the kernel has it now. Raises
        `BpfError`."""
        if ifindex not in self.expected:
            return False
        chains = self._chains([ifindex])
        if self._has_tcx and ifindex not in chains:
            return False
        is_linked = any(map(self._links.is_ours, chains.get(ifindex, ())))
        return not is_linked and not self._filters.is_in_force(ifindex)

    def _chains(self, ifindexes: Collection[int]) -> dict[int, list[int]]:
        return syscalls.query_chains(ifindexes, self._attach_type) if self._has_tcx else {}

    def put_back(self, ifindex: int) -> None:
        """Attach again what another program removed. Raises `BpfError` or `AttachError`.

        By a link if it can be: the kernel drops the interface's packets, pods' too, while it adds
        the qdisc that a filter needs (`bpf.clsact`), and the next deletion of one takes no link.
        """
        self._linked.discard(ifindex)
        self._filtered.discard(ifindex)
        self.attach(ifindex)

    def put_back_after_qdisc(self, ifindex: int) -> None:
        """As `put_back` after another program deleted the qdisc, unless a link is attached.

        Waits for RTNL once: what is attached now is not read before. A filter that was added
        meanwhile stays until `drop_spare_filter`.
        """
        if ifindex not in self.expected or ifindex in self._linked:
            return
        if self._attachment is Attachment.CLSACT:
            self._filters.attach(ifindex)
        else:
            self._links.attach_again(ifindex)
            self._linked.add(ifindex)
        self.attached.add(ifindex)

    def drop_spare_filter(self, ifindex: int) -> None:
        """Remove the filter of an interface that has a link. Raises `AttachError`."""
        if ifindex in self._linked:
            self._drop_filter(ifindex)

    def attach(self, ifindex: int, *, quickly: bool = False) -> None:
        """Attach, or replace any version's program with this one.

        An attachment of the other type is detached afterwards, so there is no gap. quickly: by a
        filter where a link is desired, if that is as good until `attach` is called again without.
        Raises `BpfError` or `AttachError`.
        """
        self._filters.program_fd = self._copies()[0]
        self.expected.add(ifindex)
        if self._attachment is Attachment.CLSACT:
            self._filters.attach(ifindex)
            self._filtered.add(ifindex)
            self._drop_link(ifindex)
        elif not (quickly and self._attach_quickly(ifindex)):
            self._links.attach(ifindex)
            self._linked.add(ifindex)
            self._drop_filter(ifindex)
        self.attached.add(ifindex)

    def _attach_quickly(self, ifindex: int) -> bool:
        """Attach a filter instead of a link, unless another program would run before it.

        A link would be attached in 15 ms under RTNL, and the links of many interfaces one after
        the other. A link that exists already is updated at once, and stays.
        """
        if ifindex in self._linked or syscalls.query_programs(ifindex, self._attach_type):
            return False
        try:
            self._filters.attach(ifindex)
        except errors.AttachError:  # another qdisc in its place, or a kernel without cls_bpf
            return False
        self._filtered.add(ifindex)
        return True

    @property
    def filtered(self) -> set[int]:
        """Interfaces on which the program should be attached, and is not by a link."""
        return self.expected - self._linked

    @property
    def unlinked(self) -> set[int]:
        """Interfaces that `attach` has given a filter where a link is desired."""
        if self._attachment is Attachment.CLSACT:
            return set()
        return (self._filtered & self.attached) - self._linked

    def detach(self, ifindex: int) -> None:
        """Detach. No error if the interface is deleted: its filters went with it.

        Raises `AttachError`.
        """
        self.mark_attached(ifindex)
        self._drop_link(ifindex)
        self._drop_filter(ifindex)
        self.attached.discard(ifindex)
        self.expected.discard(ifindex)

    def is_first(self, ifindex: int) -> bool:
        """Whether no other program runs before ours. Raises `BpfError` (ENODEV)."""
        if ifindex in self.unlinked:
            programs = syscalls.query_programs(ifindex, self._attach_type)
            return not programs and self._filters.is_first(ifindex)
        if self._attachment is Attachment.TCX:
            return self._links.is_first(ifindex)
        return self._filters.is_first(ifindex) and not (
            self._has_tcx and syscalls.query_programs(ifindex, self._attach_type)
        )

    def move_first(self, ifindex: int) -> None:
        """Move the attached program before all others, without a gap.

        A filter stays behind tcx programs where no link is desired. Raises `BpfError` or
        `AttachError`.
        """
        if ifindex in self.unlinked:
            self.attach(ifindex)
        elif self._attachment is Attachment.TCX:
            self._links.move_first(ifindex)
        elif not self._filters.is_first(ifindex):
            self._filters.move_first(ifindex)

    def _drop_link(self, ifindex: int) -> None:
        if ifindex in self._linked:
            self._links.detach(ifindex)
            self._linked.discard(ifindex)

    def _drop_filter(self, ifindex: int) -> None:
        if ifindex in self._filtered:
            self._filters.detach(ifindex)
            self._filtered.discard(ifindex)

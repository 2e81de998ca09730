"""One program's attachments, by tcx or clsact: whichever way one hangs, it is found again."""

import enum

from bpf import clsact, pins, syscalls, tcx


class Attachment(enum.StrEnum):
    """How a program hangs on an interface."""

    TCX = "tcx"
    CLSACT = "clsact"

    @classmethod
    def best(cls) -> "Attachment":
        """tcx where the kernel has it."""
        return cls.TCX if tcx.TcxLinks.is_supported() else cls.CLSACT


class Direction(enum.Enum):
    """Seen from the node: egress is towards the pod."""

    EGRESS = (syscalls.BPF_TCX_EGRESS, clsact.EGRESS)
    INGRESS = (syscalls.BPF_TCX_INGRESS, clsact.INGRESS)


class Attachments:
    """Where one program is attached, in the node namespace of the calling thread."""

    def __init__(
        self,
        installation: pins.Pins,
        program: str,
        copies: tuple[int, int],
        direction: Direction,
        attachment: Attachment,
    ) -> None:
        """copies: the program's descriptor, and that of its spare."""
        self._attach_type, parent = direction.value
        self._attachment = attachment
        self._has_tcx = tcx.TcxLinks.is_supported()
        self._links = tcx.TcxLinks(installation, program, copies, self._attach_type)
        self._filters = clsact.ClsactFilters(installation, program, copies[0], parent)
        self._linked: set[int] = set()
        self._filtered: set[int] = set()
        self.standing: set[int] = set()
        """Interfaces to which this schema's program is attached."""
        self.look()

    def close(self) -> None:
        self._filters.close()

    @property
    def elsewhere(self) -> set[int]:
        """Interfaces to which only another schema's program is attached."""
        return (self._linked | self._filtered) - self.standing

    def look(self) -> None:
        """See anew what is attached, as the kernel says."""
        linked, other_links = self._links.look()
        filtered, other_filters = self._filters.look()
        self._linked = linked | other_links
        self._filtered = filtered | other_filters
        self.standing = linked | filtered

    def notice(self, ifindex: int) -> bool:
        """Whether it is attached, also since the last look and by somebody else: podgate-cni."""
        if ifindex not in self.standing:
            if self._links.is_attached(ifindex):
                self._linked.add(ifindex)
                self.standing.add(ifindex)
            elif self._filters.is_attached(ifindex):
                self._filtered.add(ifindex)
                self.standing.add(ifindex)
        return ifindex in self.standing

    def attach(self, ifindex: int) -> None:
        """Attach, or swap to this version's program whatever version's it is.

        One that hangs the other way is detached afterwards, so there is no gap. Raises `BpfError`
        or `AttachError`.
        """
        if self._attachment is Attachment.TCX:
            self._links.attach(ifindex)
            self._linked.add(ifindex)
            self._drop_filter(ifindex)
        else:
            self._filters.attach(ifindex)
            self._filtered.add(ifindex)
            self._drop_link(ifindex)
        self.standing.add(ifindex)

    def detach(self, ifindex: int) -> None:
        """Detach; an interface that is gone has taken its filters along. Raises `AttachError`."""
        self.notice(ifindex)
        self._drop_link(ifindex)
        self._drop_filter(ifindex)
        self.standing.discard(ifindex)

    def is_first(self, ifindex: int) -> bool:
        """Whether nobody's program runs before ours. Raises `BpfError` (ENODEV)."""
        if self._attachment is Attachment.TCX:
            return self._links.is_first(ifindex)
        return self._filters.is_first(ifindex) and not (
            self._has_tcx and syscalls.query_programs(ifindex, self._attach_type)
        )

    def move_first(self, ifindex: int) -> None:
        """Put what is attached before others' programs, without a gap.

        A filter stays behind programs of tcx. Raises `BpfError` or `AttachError`.
        """
        if self._attachment is Attachment.TCX:
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

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
        program_fd: int,
        direction: Direction,
        attachment: Attachment,
    ) -> None:
        attach_type, parent = direction.value
        self._attachment = attachment
        self._links = tcx.TcxLinks(installation, program, program_fd, attach_type)
        self._filters = clsact.ClsactFilters(program, program_fd, parent)
        self._linked: set[int] = set()
        self._filtered: set[int] = set()
        self.look()

    def close(self) -> None:
        self._filters.close()

    def look(self) -> set[int]:
        """Interfaces to which it is attached now, as the kernel says."""
        self._linked = self._links.attached()
        self._filtered = self._filters.attached()
        return self._linked | self._filtered

    def attach(self, ifindex: int, *, made_qdisc: bool = False) -> bool:
        """Attach, or swap to this version; whether a clsact qdisc was made for it.

        One that hangs the other way is detached afterwards, so there is no gap; made_qdisc: the
        qdisc of its filter is ours to remove. Raises `BpfError` or `AttachError`.
        """
        if self._attachment is Attachment.TCX:
            self._links.attach(ifindex)
            self._linked.add(ifindex)
            if ifindex in self._filtered:
                self._filters.detach(ifindex, remove_qdisc=made_qdisc)
                self._filtered.discard(ifindex)
            return False
        made_qdisc = self._filters.attach(ifindex)
        self._filtered.add(ifindex)
        if ifindex in self._linked:
            self._links.detach(ifindex)
            self._linked.discard(ifindex)
        return made_qdisc

    def detach(self, ifindex: int, *, remove_qdisc: bool) -> None:
        """Detach; an interface that is gone has taken its filters along. Raises `AttachError`."""
        if ifindex in self._linked:
            self._links.detach(ifindex)
            self._linked.discard(ifindex)
        if ifindex in self._filtered or remove_qdisc:
            self._filters.detach(ifindex, remove_qdisc=remove_qdisc)
            self._filtered.discard(ifindex)

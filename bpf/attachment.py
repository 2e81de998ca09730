"""How programs are attached to interfaces."""

import enum

from bpf import tcx


class Attachment(enum.StrEnum):
    """How a program is attached to an interface."""

    TCX = "tcx"
    CLSACT = "clsact"

    @classmethod
    def best(cls) -> "Attachment":
        """tcx where the kernel supports it."""
        return cls.TCX if tcx.TcxLinks.is_supported() else cls.CLSACT

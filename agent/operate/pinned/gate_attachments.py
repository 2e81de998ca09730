"""Where the gates' programs are attached, as the kernel has it now."""

from bpf import clsact, pins, program_specs, syscalls, tcx


class GateAttachments:
    """Of the calling thread's network namespace, by any attachment type."""

    def __init__(self, installation: pins.Pins) -> None:
        program = program_specs.GATE_EGRESS
        self._links = tcx.TcxLinks(installation, program, list, syscalls.BPF_TCX_EGRESS)
        self._filters = clsact.ClsactFilters(installation, program, -1, clsact.EGRESS)

    def close(self) -> None:
        self._filters.close()

    def of(self, ifindex: int) -> str:
        """`tcx`, `clsact`, or empty."""
        if self._links.is_attached(ifindex):
            return "tcx"
        return "clsact" if self._filters.is_attached(ifindex) else ""

"""Check of the programs that other commands run."""

from agent.operate.doctor.finding import Finding, ok, warning
from agent.operate.pinned import bpftool


def check() -> Finding:
    try:
        path = bpftool.find()
    except bpftool.BpftoolError:
        return warning(
            "bpftool",
            "bpftool is not installed: 'podgate programs' does not work here.",
            "Install the distribution's package bpftool (Debian; Ubuntu: linux-tools-common), or "
            "run the command in podgate's image.",
        )
    return ok("bpftool", f"{path} is there for 'podgate programs'.")

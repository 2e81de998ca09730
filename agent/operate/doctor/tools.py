"""Check of the programs that other commands run."""

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.operate.doctor.results import Passed, Result
from agent.operate.pinned import bpftool


def check() -> Result:
    try:
        path = bpftool.find()
    except bpftool.BpftoolError:
        return found(
            kinds.BPFTOOL_MISSING,
            "bpftool is not installed: 'podgate programs' does not work here.",
        )
    return Passed("bpftool", f"{path} is there for 'podgate programs'.")

"""Removes gates as other programs of a node do, and finds whether they are back."""

import contextlib
import os
import pathlib
import subprocess

from agent.lab.lab import LabPod
from bpf import clsact, pins, syscalls

EGRESS = syscalls.BPF_TCX_EGRESS


def filter_order(bpffs: pathlib.Path, pod: LabPod) -> list[bool]:
    """Whether each filter at the egress is podgate's, in the order in which they run."""
    filters = clsact.ClsactFilters(pins.Pins(bpffs), "", 0, clsact.EGRESS)
    with contextlib.closing(filters):
        return [is_ours for _, is_ours in filters.order(pod.ifindex)]


def delete_qdisc(pod: LabPod) -> bool:
    """As felix does before it attaches by tcx. False if there was none."""
    command = ["tc", "qdisc", "del", "dev", pod.interface, "clsact"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def delete_filters(pod: LabPod) -> None:
    """Those of the egress; the qdisc stays."""
    subprocess.run(["tc", "filter", "del", "dev", pod.interface, "egress"], check=True)


def links(bpffs: pathlib.Path, pod: LabPod, program: str = "gate_egress") -> list[pathlib.Path]:
    """The pin, if there is one. A new pod has filters first."""
    return list(bpffs.glob(f"podgate/v*/links/{program}-{pod.ifindex}"))


def detach_link(bpffs: pathlib.Path, pod: LabPod, program: str = "gate_egress") -> None:
    """As `bpftool link detach` does; the pin stays."""
    (link,) = links(bpffs, pod, program)
    with os.fdopen(syscalls.open_pin(str(link)), "rb") as opened:
        syscalls.link_detach(opened.fileno())

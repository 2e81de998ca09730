"""Check of packet sockets that are older than podgate: they were made before its hooks."""

import os
import pathlib
import time

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.linux.procfs import Procfs
from agent.listing import listed
from agent.operate.doctor.results import Passed, Result
from bpf import pins


def check(bpffs: pathlib.Path, procfs: Procfs | None = None) -> Result:
    """By the start of the processes that have them: a socket has no time of its own."""
    try:
        installed = pins.Pins(bpffs).root.stat().st_ctime
    except OSError:
        return Passed(
            "older-sockets", "podgate is not installed; packet sockets will be older than it."
        )
    return of_processes_before(time.time() - installed, procfs or Procfs())


def of_processes_before(age_seconds: float, procfs: Procfs) -> Result:
    """age_seconds: since podgate was installed."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    packet_sockets = procfs.packet_sockets()
    holders = []
    for pid in sorted(procfs.pids()) if packet_sockets else ():
        started = procfs.started(pid)
        if started is None or now - started / ticks <= age_seconds:
            continue
        if packet_sockets & procfs.sockets(pid):
            holders.append(f"{procfs.name(pid)} ({pid})")
    if not holders:
        return Passed("older-sockets", "No packet socket is of a process older than podgate.")
    return found(
        kinds.UNCHECKED_SOCKETS,
        f"{listed(holders)} may have packet sockets from before podgate was installed: with "
        "PACKET_QDISC_BYPASS or AF_XDP these send past gates.",
    )

"""What a full aggregate of drop sources costs the agent: a figure of the bench `start`.

agent_cpu_percent_full_sources: of an agent at rest with one enforced pod, over a period in which it
reads the aggregate once. The baseline is the same agent with an empty aggregate.
"""

import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import time

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import BPFFS, Lab, LabPod
from bpf import abi, map_specs, maps, pins
from tests.bench import figures
from tests.kernel import cgroups
from tests.processes import BARE_PYTHON

# The kernel forgets the oldest sources a little before the table is full.
_CGROUPS = abi.MAX_DROP_SOURCES * 15 // 16 // abi.CGROUP_SOURCES
_PORTS = abi.CGROUP_SOURCES
_FIRST_PORT = 20_000
_EMPTY_SECONDS = 15.0
# agent/drops/history.py: every 60 s, to within 2 s.
_FULL_SECONDS = 62.0
# After the agent has named new sources.
_SETTLE_SECONDS = 5.0

# One dropped SYN to each of these ports.
_SCAN = """
import socket, sys
address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for port in range(first, first + count):
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.connect_ex((address, port))
"""


def measure() -> None:
    with (
        Lab() as network,
        tempfile.TemporaryDirectory() as directory,
        cgroups.cgroup() as kubelet,
        contextlib.ExitStack() as sources,
    ):
        pod = network.add_pod("web", 1)
        agent = AgentProcess(pathlib.Path(directory), BPFFS)
        agent.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        agent.write_manifest(pod, mode="enforce", container={})
        try:
            agent.start()
            agent.wait_for("the gate", lambda report: report.is_synced and bool(report.pods))
            time.sleep(_SETTLE_SECONDS)
            empty = _cpu_percent(agent.pid, _EMPTY_SECONDS)
            for _ in range(_CGROUPS):
                _scan(sources.enter_context(cgroups.cgroup()), pod)
            time.sleep(_SETTLE_SECONDS)
            full = _cpu_percent(agent.pid, _FULL_SECONDS)
            entries = _entries()
        finally:
            agent.stop(signal.SIGKILL)
            agent.cleanup()
    sys.stderr.write(f"bench: {entries} of {abi.MAX_DROP_SOURCES} sources\n")
    figures.emit("start", "agent_cpu_percent_full_sources", [full], "%", baseline=[empty])


def _scan(group: cgroups.Cgroup, pod: LabPod) -> None:
    scan = [*BARE_PYTHON, "-c", _SCAN, pod.ipv4, str(_FIRST_PORT), str(_PORTS)]
    done = group.run(scan)
    if done.returncode:
        sys.stderr.write(done.stderr.decode())
        sys.exit(1)


def _entries() -> int:
    with maps.Map.open(
        pins.Pins(BPFFS).map(map_specs.DROP_SOURCES), map_specs.DROP_SOURCES
    ) as opened:
        return sum(1 for _ in opened.items())


def _cpu_percent(pid: int, seconds: float) -> float:
    before, started = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (_cpu_seconds(pid) - before) / (time.monotonic() - started)


def _cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

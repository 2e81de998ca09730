"""How long a new interface of the host is without a program: figures of the bench `start`.

The interfaces are veth pairs within the host, of which each end gets one. The times are from when
the kernel lists the interface until the program is attached: `newborn_interface_program_p50_ms` and
`_p99_ms` of pairs that are created one by one, `newborn_burst_program_p50_ms` and `_p99_ms` of as
many at once.
"""

import contextlib
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import BPFFS, Lab
from bpf import clsact, pins, program_specs
from tests.bench import figures

_RUNS = 3
_PAIRS = 25
# The agent handles what happens within a tenth of a second together: pairs are further apart.
_APART_SECONDS = 0.3
_POLL_SECONDS = 0.001
_LIMIT_SECONDS = 60.0


def measure() -> None:
    with Lab() as network, tempfile.TemporaryDirectory() as directory:
        agent = AgentProcess(pathlib.Path(directory), BPFFS)
        agent.write_manifest(network.add_pod("web", 1), mode="enforce", container={})
        try:
            agent.start()
            agent.wait_for("the gate", lambda report: report.is_synced and bool(report.pods))
            with _attachment() as is_attached:
                one_by_one = [
                    [ms for number in range(_PAIRS) for ms in _create(is_attached, 1, number)]
                    for _ in range(_RUNS)
                ]
                bursts = [_create(is_attached, _PAIRS) for _ in range(_RUNS)]
        finally:
            agent.stop(signal.SIGKILL)
            agent.cleanup()
    for name, runs in (("interface", one_by_one), ("burst", bursts)):
        for percentile, of in (("p50", statistics.median), ("p99", figures.p99)):
            figure = f"newborn_{name}_program_{percentile}_ms"
            figures.emit("start", figure, [of(samples) for samples in runs], "ms")


@contextlib.contextmanager
def _attachment() -> Iterator[Callable[[int], bool]]:
    """Whether an interface has its program: the pin of a link, or a filter. No chain is queried,
    since that waits for the lock that the agent needs."""
    installation = pins.Pins(BPFFS)
    filters = clsact.ClsactFilters(installation, program_specs.DEVICE_GATE, -1, clsact.EGRESS)
    with contextlib.closing(filters):
        yield (
            lambda ifindex: (
                os.path.lexists(installation.link(program_specs.DEVICE_GATE, ifindex))
                or filters.is_attached(ifindex)
            )
        )


def _create(is_attached: Callable[[int], bool], pairs: int, first: int = 0) -> list[float]:
    """Create this many pairs, and delete them. Returns the milliseconds of each interface."""
    ends = [(f"new{number}", f"other{number}") for number in range(first, first + pairs)]
    missing = {name for pair in ends for name in pair}
    listed_at: dict[int, float] = {}
    attached_at: dict[int, float] = {}
    commands = "".join(f"link add {one} type veth peer name {other}\n" for one, other in ends)
    with subprocess.Popen(["ip", "-batch", "-"], stdin=subprocess.PIPE, text=True) as creating:
        assert creating.stdin is not None
        creating.stdin.write(commands)
        creating.stdin.close()
        deadline = time.perf_counter() + _LIMIT_SECONDS
        while missing or len(attached_at) < len(listed_at):
            now = time.perf_counter()
            assert now < deadline, f"no program, or no interface: {listed_at}, {sorted(missing)}"
            for name in list(missing):
                with contextlib.suppress(OSError):
                    listed_at[socket.if_nametoindex(name)] = now
                    missing.remove(name)
            for ifindex in listed_at.keys() - attached_at.keys():
                if is_attached(ifindex):
                    attached_at[ifindex] = time.perf_counter()
            time.sleep(_POLL_SECONDS)
    commands = "".join(f"link del {one}\n" for one, _ in ends)
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    time.sleep(_APART_SECONDS)
    return [(attached_at[ifindex] - at) * 1000 for ifindex, at in listed_at.items()]

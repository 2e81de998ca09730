"""What a process uses while nothing happens: wake-ups, CPU time, system calls, memory."""

import collections
import contextlib
import dataclasses
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

_PERF = "perf"
_SYSTEM_CALLS = "raw_syscalls:sys_enter"


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Of one process in one window."""

    wakeups_per_second: Mapping[str, float]
    """Voluntary context switches, by the thread's name in the kernel; `main` is the first one."""
    cpu_percent: float
    """Of one core."""
    pss_mb: float
    """At the end of the window."""

    @property
    def all_wakeups_per_second(self) -> float:
        return sum(self.wakeups_per_second.values())


def samples(pids: Sequence[int], seconds: float) -> dict[int, Sample]:
    """One window of this length, of all of these processes at once. Blocks."""
    before = {pid: (_switches(pid), cpu_seconds(pid)) for pid in pids}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - started
    found = {}
    for pid in pids:
        switches, cpu = _switches(pid), cpu_seconds(pid)
        switches_before, cpu_before = before[pid]
        found[pid] = Sample(
            {
                name: max(0, count - switches_before[name]) / elapsed
                for name, count in switches.items()
            },
            (cpu - cpu_before) / elapsed * 100,
            pss_mb(pid),
        )
    return found


def system_calls_per_second(pid: int, seconds: float) -> float | None:
    """Of all threads, by perf; None where it is not installed or may not count. Blocks."""
    if shutil.which(_PERF) is None:
        return None
    done = subprocess.run(
        [*(_PERF, "stat", "-x,", "-e", _SYSTEM_CALLS), "-p", str(pid), "sleep", f"{seconds:g}"],
        check=False,
        capture_output=True,
        text=True,
    )
    count = done.stderr.partition(",")[0]
    return int(count) / seconds if count.isdecimal() else None


def children(pid: int) -> list[int]:
    """Processes that the first thread started."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


def cpu_seconds(pid: int) -> float:
    """Of all threads that run; clock ticks are too coarse for what rests."""
    return sum(int(text.split()[0]) for _, text in _of_tasks(pid, "schedstat")) / 1e9


def pss_mb(pid: int) -> float:
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _switches(pid: int) -> collections.Counter[str]:
    """Voluntary ones. Threads that have ended do not count."""
    counts = collections.Counter[str]()
    for task, text in _of_tasks(pid, "status"):
        fields = dict(line.split(":\t", 1) for line in text.splitlines())
        name = "main" if task == pid else fields["Name"]
        counts[name] += int(fields["voluntary_ctxt_switches"])
    return counts


def _of_tasks(pid: int, name: str) -> Iterator[tuple[int, str]]:
    """This file of each thread, but of those that end meanwhile."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int(task.name), (task / name).read_text(encoding="utf-8")

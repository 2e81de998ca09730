"""How full maps are, and how long programs have run."""

import dataclasses
import pathlib
import struct
from collections.abc import Mapping

from bpf import maps, syscalls

# `enum bpf_map_type`: hash, per-CPU hash, LRU hash. Keys of arrays always exist, and the one map of
# maps has an entry for each gate.
_KINDS = {1: "hash", 5: "hash", 9: "lru"}

_STATS = pathlib.Path("/proc/sys/kernel/bpf_stats_enabled")

# `struct bpf_prog_info` up to run_cnt, in 64 bit words: run_time_ns is the 25th (Linux 5.1).
_PROGRAM_INFO = struct.Struct("=24QQQ")


@dataclasses.dataclass(frozen=True, slots=True)
class MapUsage:
    """Entries of one map, and how many it has room for. kind: hash, which rejects more, or lru,
    which replaces the one that was not used for the longest time."""

    entries: int
    max_entries: int
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRuns:
    """What the kernel measured of one program since it was loaded, while it measures."""

    runs: int
    seconds: float


def map_usage(opened: Mapping[str, maps.Map]) -> dict[str, MapUsage]:
    """By name, of maps whose entries come and go. It reads all keys, 256 in a system call: a full
    map takes milliseconds, so call it in a thread. Raises `BpfError`.
    """
    return {
        name: MapUsage(sum(1 for _ in one.items()), one.spec.max_entries, _KINDS[one.spec.type])
        for name, one in opened.items()
        if one.spec.type in _KINDS
    }


def program_runs(programs: Mapping[str, int]) -> dict[str, ProgramRuns]:
    """By name of the program, from its descriptor; nothing while kernel.bpf_stats_enabled is 0."""
    if not measures_programs():
        return {}
    return {name: _runs(descriptor) for name, descriptor in programs.items()}


def measures_programs() -> bool:
    """Whether the kernel measures all programs, which costs each run some 20 ns."""
    try:
        return _STATS.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


def _runs(descriptor: int) -> ProgramRuns:
    info = syscalls.object_info(descriptor, _PROGRAM_INFO.size)
    *_, nanoseconds, runs = _PROGRAM_INFO.unpack(info)
    return ProgramRuns(runs, nanoseconds / 1e9)

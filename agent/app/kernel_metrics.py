"""Metrics of what works in the kernel without the agent: heartbeat, hooks, maps and programs."""

import asyncio
import time
from collections.abc import Iterator, Mapping

from prometheus_client import core

from agent.metrics import MetricFamily, labelled, single
from bpf import abi, map_specs, maps, usage
from bpf.usage import MapUsage, ProgramRuns

HEARTBEAT_AGE = MetricFamily(
    "podgate_heartbeat_age_seconds",
    "gauge",
    "Time since the last heartbeat of an agent. After 15 s declared ports open to host processes "
    "where podgate_kubelet_followed is 0.",
)
DEAD_MAN_REMAINING = MetricFamily(
    "podgate_dead_man_remaining_seconds",
    "gauge",
    "Time until all gates open if no agent starts (--dead-man-hours); 0: they are open. Absent "
    "with --dead-man-hours=0.",
)
MAP_ENTRIES = MetricFamily("podgate_map_entries", "gauge", "Entries of a BPF map.", ("map",))
MAP_MAX_ENTRIES = MetricFamily(
    "podgate_map_max_entries",
    "gauge",
    "Entries that a BPF map has room for. A full map of kind lru replaces the entry that was not "
    "used for the longest time.",
    ("map", "kind"),
)
PROGRAM_RUNS = MetricFamily(
    "podgate_program_runs_total",
    "counter",
    "Runs of a BPF program, while kernel.bpf_stats_enabled is 1.",
    ("program",),
)
PROGRAM_SECONDS = MetricFamily(
    "podgate_program_run_seconds_total",
    "counter",
    "Time that a BPF program has run, while kernel.bpf_stats_enabled is 1.",
    ("program",),
)


class KernelCollector:
    """`refresh` it before each scrape: maps are read in a thread. Needs no running agent."""

    def __init__(self, opened: Mapping[str, maps.Map], programs: Mapping[str, int]) -> None:
        """opened, programs: by name, as in `bpf.loader.Loaded`."""
        self._maps = opened
        self._programs = programs
        self._config = abi.CConfig()
        self._usage: Mapping[str, MapUsage] = {}
        self._runs: Mapping[str, ProgramRuns] = {}

    async def refresh(self) -> None:
        await asyncio.to_thread(self.read)

    def read(self) -> None:
        """As `refresh`, in the calling thread. Raises `BpfError`."""
        value = self._maps[map_specs.CONFIG.name].get(bytes(map_specs.CONFIG.key_size))
        assert value is not None  # an array has all of its keys
        self._config = abi.CConfig.from_buffer_copy(value)
        self._usage = usage.map_usage(self._maps)
        self._runs = usage.program_runs(self._programs)

    def collect(self) -> Iterator[core.Metric]:
        config = self._config
        if config.heartbeat_ns:
            age_ns = max(0, time.monotonic_ns() - config.heartbeat_ns)
            yield single(HEARTBEAT_AGE, age_ns / 1e9)
            if config.dead_man_ns:
                yield single(DEAD_MAN_REMAINING, max(0, config.dead_man_ns - age_ns) / 1e9)
        found = sorted(self._usage.items())
        yield labelled(MAP_ENTRIES, (((name,), one.entries) for name, one in found))
        yield labelled(
            MAP_MAX_ENTRIES, (((name, one.kind), one.max_entries) for name, one in found)
        )
        runs = sorted(self._runs.items())
        yield labelled(PROGRAM_RUNS, (((name,), one.runs) for name, one in runs))
        yield labelled(PROGRAM_SECONDS, (((name,), one.seconds) for name, one in runs))

"""Metrics of the gates' own counters, which are per-CPU maps, and of the running agent.

Drops are counted from the maps at scrape time, never from events, which may be lost.
"""

import asyncio
import collections
from collections.abc import Iterator

from prometheus_client import core

from agent import VERSION
from agent.gates.worker import GateWorker
from agent.metrics import MetricFamily, new_metric
from agent.pods.store import RELAY, PodStore
from bpf import sources
from bpf.gates import Counts

GATE_PACKETS = MetricFamily(
    "podgate_gate_packets_total",
    "counter",
    "Host packets to a gated pod or relay, by verdict and reason.",
    ("namespace", "pod", "interface", "verdict", "reason"),
)
NODE_DROPS = MetricFamily(
    "podgate_node_drops_total",
    "counter",
    "System calls and packets dropped on the host before an interface is chosen, by reason.",
    ("reason",),
)
GATES = MetricFamily("podgate_gates", "gauge", "Gated interfaces, by mode.", ("mode",))
BUILD_INFO = MetricFamily(
    "podgate_build_info",
    "gauge",
    "1, labelled with version, program hash and attachment type of the running agent.",
    ("version", "source_hash", "attachment"),
)
LOAD_SECONDS = MetricFamily(
    "podgate_program_load_seconds",
    "gauge",
    "Time to load the BPF programs at start, by where they came from: prebuilt (with the image), "
    "compiled (by bcc) or pinned (reused).",
    ("programs",),
)


class GateCollector:
    """`refresh` it before each scrape: maps are read in a thread."""

    def __init__(self, store: PodStore, gate_worker: GateWorker) -> None:
        self._store = store
        self._gate_worker = gate_worker
        self._counts: dict[int, Counts] = {}
        self._node_counts: Counts = {}
        self._source_hash = sources.fingerprint()

    async def refresh(self) -> None:
        self._counts = await self._gate_worker.counts()
        self._node_counts = await asyncio.to_thread(self._gate_worker.gates.host_counts)

    def collect(self) -> Iterator[core.Metric]:
        packets, gates = new_metric(GATE_PACKETS), new_metric(GATES)
        interfaces = [
            (state.pod, ifindex, interface.name)
            for state in self._store.states()
            for ifindex, interface in state.gates.items()
        ]
        interfaces += [(RELAY, ifindex, name) for ifindex, name in self._store.relay_gates.items()]
        for pod, ifindex, name in interfaces:
            for (verdict, reason), count in self._counts.get(ifindex, {}).items():
                labels = (pod.namespace, pod.name, name, verdict.label, reason.label)
                packets.add_metric(labels, count)
        modes = collections.Counter(pod.mode.label for pod, _, _ in interfaces)
        for mode, number in sorted(modes.items()):
            gates.add_metric((mode,), number)
        yield packets
        yield gates
        drops = new_metric(NODE_DROPS)
        for label, count in sorted(self._node_drops().items()):
            drops.add_metric((label,), count)
        yield drops
        yield from self._agent()

    def _node_drops(self) -> dict[str, int]:
        return {reason.label: count for (_, reason), count in self._node_counts.items()}

    def _agent(self) -> Iterator[core.Metric]:
        info, load = new_metric(BUILD_INFO), new_metric(LOAD_SECONDS)
        loaded = self._gate_worker.loaded
        info.add_metric((VERSION, self._source_hash, self._gate_worker.gates.attachment.value), 1)
        load.add_metric((loaded.outcome.origin.value,), loaded.outcome.seconds)
        yield info
        yield load

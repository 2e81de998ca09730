"""Metrics of the gates' own counters, which are per-CPU maps, and of the loaded programs.

Drops are counted from the maps at scrape time, never from events, which may be lost.
"""

import collections
from collections.abc import Iterator, Mapping

from prometheus_client import core

from agent import VERSION
from agent.gates.worker import GateWorker
from agent.metrics import Labels, MetricFamily, labelled
from agent.pods.store import PodStore
from bpf import sources
from bpf.gates import Counts
from bpf.verdicts import Reason, Verdict

GATE_PACKETS = MetricFamily(
    "podgate_gate_packets_total",
    "counter",
    "Host packets to a gated pod, by verdict and reason.",
    ("namespace", "pod", "interface", "verdict", "reason"),
)
RELAY_GATE_PACKETS = MetricFamily(
    "podgate_relay_gate_packets_total",
    "counter",
    "Host packets to the relay of mode strict, by verdict and reason.",
    ("interface", "verdict", "reason"),
)
NODE_DROPS = MetricFamily(
    "podgate_node_drops_total",
    "counter",
    "System calls and packets dropped on the host before an interface is chosen, by reason.",
    ("reason",),
)
GATES = MetricFamily("podgate_gates", "gauge", "Gated interfaces of pods, by mode.", ("mode",))
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

# What passes for want of the agent or the kubelet. These samples are there from the start, or an
# alert's increase() would not see the first packets.
_OPEN: dict[tuple[Verdict, Reason], int] = {
    (Verdict.PASS, reason): 0 for reason in (Reason.STALE, Reason.DEAD_MAN, Reason.UNIDENTIFIED)
}


class GateCollector:
    """`refresh` it before each scrape: maps are read in a thread."""

    def __init__(self, store: PodStore, gate_worker: GateWorker) -> None:
        self._store = store
        self._gate_worker = gate_worker
        self._counts: Mapping[int, Counts] = {}
        self._node_drops: Mapping[str, int] = {}
        self._source_hash = sources.fingerprint()

    async def refresh(self) -> None:
        self._counts = await self._gate_worker.counts()
        self._node_drops = await self._gate_worker.host_drops()

    def collect(self) -> Iterator[core.Metric]:
        states = self._store.states()
        modes = collections.Counter(state.pod.mode for state in states for _ in state.gates)
        yield labelled(GATE_PACKETS, self._packets())
        yield labelled(
            RELAY_GATE_PACKETS,
            (
                ((name, *labels), count)
                for ifindex, name in self._store.relay_gates.items()
                for labels, count in self._of_gate(ifindex)
            ),
        )
        yield labelled(GATES, (((mode.label,), count) for mode, count in sorted(modes.items())))
        yield labelled(
            NODE_DROPS, (((reason,), count) for reason, count in sorted(self._node_drops.items()))
        )
        gates, outcome = self._gate_worker.gates, self._gate_worker.loaded.outcome
        build = (VERSION, self._source_hash, gates.attachment.value)
        yield labelled(BUILD_INFO, [(build, 1)])
        yield labelled(LOAD_SECONDS, [((outcome.origin.value,), outcome.seconds)])

    def _packets(self) -> Iterator[tuple[Labels, float]]:
        for state in self._store.states():
            for ifindex, interface in state.gates.items():
                for labels, count in self._of_gate(ifindex):
                    yield (state.pod.namespace, state.pod.name, interface.name, *labels), count

    def _of_gate(self, ifindex: int) -> Iterator[tuple[Labels, float]]:
        for (verdict, reason), count in {**_OPEN, **self._counts.get(ifindex, {})}.items():
            yield (verdict.label, reason.label), count

"""Metrics from the pinned maps, for a node whose agent does not respond: counters live in maps."""

import collections
import pathlib
from collections.abc import Iterator

import prometheus_client
from prometheus_client import core, registry

from agent.app.component_metrics import HOOK_ATTACHED
from agent.app.gate_metrics import GATE_PACKETS, GATES, NODE_DROPS
from agent.app.kernel_metrics import KernelCollector
from agent.kubelet.admission import ADMITTED
from agent.metrics import Labels, labelled, single
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned import status as pinned_status
from agent.operate.pinned.report import PinnedStatus
from bpf import pins


def exposition(installation: pins.Pins, run_directory: pathlib.Path) -> bytes:
    """What a scrape of an agent has of these, by the same names. run_directory: the agent's, with
    the names of pods. Blocks for milliseconds. Raises `PinsUnreadableError`.
    """
    made = prometheus_client.CollectorRegistry()
    made.register(_StatusCollector(pinned_status.read(installation, run_directory)))
    with pinned_installation.opened(installation) as loaded:
        kernel = KernelCollector(loaded.open_maps, loaded.programs)
        kernel.read()
    made.register(kernel)
    content: bytes = prometheus_client.generate_latest(made)
    return content


class _StatusCollector(registry.Collector):
    def __init__(self, status: PinnedStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[core.Metric]:
        status = self._status
        yield single(ADMITTED, status.kubelet is not None)
        yield labelled(GATE_PACKETS, self._packets())
        modes = collections.Counter(gate.mode for gate in status.gates)
        yield labelled(GATES, (((mode,), count) for mode, count in sorted(modes.items())))
        yield labelled(
            NODE_DROPS, (((reason,), count) for reason, count in sorted(status.node_drops.items()))
        )
        yield labelled(
            HOOK_ATTACHED, (((hook.name,), hook.problem is None) for hook in status.hooks)
        )

    def _packets(self) -> Iterator[tuple[Labels, float]]:
        for gate in self._status.gates:
            for verdict, reasons in gate.packets.items():
                for reason, count in reasons.items():
                    yield (gate.namespace, gate.pod, gate.interface, verdict, reason), count

"""Metrics of gates: attaching, chain order, path tests and claimed addresses."""

from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import Labels, MetricFamily, counter, histogram, labelled
from agent.pods.store import PodStore

# 0.1 ms by clsact, 10 ms by tcx, seconds when others hold RTNL.
_ATTACH_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
# A runtime needs 0.1 to 2 s for a sandbox; minutes are a node that came up before its agent.
_UNGATED_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600)

ATTACH_SECONDS = MetricFamily(
    "podgate_gate_attach_duration_seconds", "histogram", "Time to attach one gate."
)
UNGATED_SECONDS = MetricFamily(
    "podgate_sandbox_ungated_duration_seconds",
    "histogram",
    "Time from sandbox creation to its first gate, for sandboxes that podgate-cni did not gate.",
)
GATES_LOST = MetricFamily(
    "podgate_gates_lost_total",
    "counter",
    "Gates lost from an interface that could not be attached again at once.",
)
GATES_PUT_BACK = MetricFamily(
    "podgate_gates_put_back_total",
    "counter",
    "Gates that another program removed from an interface, and that were put back.",
)
GATE_UPDATES_FAILED = MetricFamily(
    "podgate_gate_updates_failed_total",
    "counter",
    "Failed updates of attached gates, which keep their last addresses and rules.",
)
GATES_REORDERED = MetricFamily(
    "podgate_gates_reordered_total",
    "counter",
    "Gates moved back before another program on the same interface.",
)
PATH_TESTS = MetricFamily(
    "podgate_path_tests_total", "counter", "Path tests of enforced pods, by result.", ("result",)
)
PATH_TEST_ADDRESSES = MetricFamily(
    "podgate_path_test_addresses",
    "gauge",
    "Addresses of an enforced pod, by result of the last path test; bypassed means the host "
    "reaches the address without passing the gate.",
    ("namespace", "pod", "result"),
)
UNCONFIRMED_ADDRESSES = MetricFamily(
    "podgate_unconfirmed_addresses",
    "gauge",
    "Addresses in a pod's network namespace that neither the container runtime nor the node's "
    "routes confirm; they count in the pod's own gate alone.",
    ("namespace", "pod"),
)


class GateMetrics:
    """Counts what the parts of this package do, and reads the rest from the store."""

    def __init__(self, store: PodStore) -> None:
        self._store = store
        self.attach_seconds = histogram(ATTACH_SECONDS, _ATTACH_BUCKETS)
        self.ungated_seconds = histogram(UNGATED_SECONDS, _UNGATED_BUCKETS)
        self.gates_lost = counter(GATES_LOST)
        self.gates_put_back = counter(GATES_PUT_BACK)
        self.gate_updates_failed = counter(GATE_UPDATES_FAILED)
        self.gates_reordered = counter(GATES_REORDERED)
        self.path_tests = counter(PATH_TESTS)

    def collect(self) -> Iterator[core.Metric]:
        yield from self.attach_seconds.collect()
        yield from self.ungated_seconds.collect()
        yield from self.gates_lost.collect()
        yield from self.gates_put_back.collect()
        yield from self.gate_updates_failed.collect()
        yield from self.gates_reordered.collect()
        yield from self.path_tests.collect()
        yield labelled(PATH_TEST_ADDRESSES, self._tested())
        yield labelled(
            UNCONFIRMED_ADDRESSES,
            (
                ((state.pod.namespace, state.pod.name), len(state.claims.unconfirmed))
                for state in self._store.states()
                if state.claims.unconfirmed
            ),
        )

    def _tested(self) -> Iterator[tuple[Labels, float]]:
        for state in self._store.states():
            results = list(state.path_test.results.values()) if state.path_test else []
            for result in sorted(set(results)):
                labels = (state.pod.namespace, state.pod.name, result.value)
                yield labels, results.count(result)

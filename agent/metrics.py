"""Prometheus metrics. Every name and label is listed in docs/reference/metrics.md.

Drops are counted from the per-CPU map at scrape time, never from events, which may be lost.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
import prometheus_client
from prometheus_client import core

from agent import VERSION
from agent.pods.conditions import TYPES, Conditions
from agent.pods.pod import Pod
from bpf.gates import Counts

# Probes answer in well under a millisecond on a healthy node and end at their timeout.
_PROBE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10)
# 0.1 ms by clsact, 10 ms by tcx, seconds when others hold RTNL.
_ATTACH_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
# A runtime needs 0.1 to 2 s for a sandbox; minutes are a node that came up before its agent.
_UNGATED_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600)
# Microseconds while the loop is idle; where it is seconds, the cap holds probes back.
_DELAY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5)

# A "_created" series beside every other one doubles what is stored and tells nobody anything.
prometheus_client.disable_created_metrics()


class Family(msgspec.Struct, frozen=True):
    """One metric: docs/reference/metrics.md is made of these."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


GATE_PACKETS = Family(
    "podgate_gate_packets_total",
    "counter",
    "Packets that the node sent to a gated pod, by verdict and reason.",
    ("namespace", "pod", "interface", "verdict", "reason"),
)
NODE_REFUSALS = Family(
    "podgate_node_refusals_total",
    "counter",
    "System calls and packets refused before an interface was chosen, by reason.",
    ("reason",),
)
REFUSALS_UNTOLD = Family(
    "podgate_refusals_untold_total",
    "counter",
    "Refusals that were counted and not told one by one, since the kernel limits those.",
)
GATES = Family("podgate_gates", "gauge", "Gated interfaces by mode.", ("mode",))
POD_CONDITION = Family(
    "podgate_pod_condition",
    "gauge",
    "1 for the status that a pod's condition has now.",
    ("namespace", "pod", "condition", "status", "reason"),
)
MANIFEST_PROBLEM = Family(
    "podgate_manifest_problem",
    "gauge",
    "1 for a manifest that cannot be used; its last good content stays in force.",
    ("file", "reason"),
)
INFO = Family(
    "podgate_info", "gauge", "1, with what is running.", ("version", "source_hash", "attachment")
)
LOAD_SECONDS = Family(
    "podgate_load_seconds", "gauge", "Time to load, or only open, the programs.", ("compiled",)
)
ATTACH_SECONDS = Family("podgate_gate_attach_seconds", "histogram", "Time to attach one gate.")
UNGATED_SECONDS = Family(
    "podgate_ungated_seconds",
    "histogram",
    "Time from a sandbox's creation to its gate, of those that podgate-cni had not gated before.",
)
GATES_LOST = Family(
    "podgate_gates_lost_total",
    "counter",
    "Gates that could not be put back on an interface that had one.",
)
SELF_TESTS = Family(
    "podgate_self_tests_total",
    "counter",
    "Self-tests of the way to an enforced pod's address, by result.",
    ("result",),
)
SELF_TEST_PATHS = Family(
    "podgate_self_test_paths",
    "gauge",
    "Addresses of an enforced pod by what their last self-test found; `bypassed`: the node reaches "
    "it past the gate.",
    ("namespace", "pod", "result"),
)
UNCONFIRMED_ADDRESSES = Family(
    "podgate_unconfirmed_addresses",
    "gauge",
    "Addresses in a pod's network namespace that neither the container runtime nor the node's "
    "routes confirm; they count in the pod's own gate alone.",
    ("namespace", "pod"),
)
OLDER_FLOWS = Family(
    "podgate_older_flows",
    "gauge",
    "Flows that the node began before the pod's gate enforced, and that go on.",
    ("namespace", "pod"),
)
OLDER_FLOWS_ENDED = Family(
    "podgate_older_flows_ended_total",
    "counter",
    "Such flows that --close-existing-flows has ended.",
)
GATES_MOVED = Family(
    "podgate_gates_moved_total",
    "counter",
    "Gates that were put before somebody else's program on the same interface again.",
)
PROBES = Family(
    "prober_probe_total",
    "counter",
    "Probes by result, as the kubelet counts them (pkg/kubelet/prober/prober_manager.go).",
    ("probe_type", "result", "container", "pod", "namespace", "pod_uid"),
)
PROBE_SECONDS = Family(
    "prober_probe_duration_seconds",
    "histogram",
    "Duration of probes, as the kubelet measures it.",
    ("probe_type", "container", "pod", "namespace"),
)

PROBES_IN_FLIGHT = Family("podgate_probes_in_flight", "gauge", "Probes under way.")
PROBES_WAITING = Family(
    "podgate_probes_waiting", "gauge", "Probes that are due and held back by the cap."
)
PROBE_DELAY_SECONDS = Family(
    "podgate_probe_delay_seconds", "histogram", "Time by which probes began after they were due."
)
LISTENER_HINTS = Family(
    "podgate_listener_hints_total",
    "counter",
    "Listeners of pods that opened or closed, and what looking at them came to.",
    ("kind", "fate"),
)
LISTENER_EVENTS_LOST = Family(
    "podgate_listener_events_lost_total",
    "counter",
    "Listener events for which there was no room; the pods' probes run at their times as ever.",
)
LISTENERS_UNWATCHED = Family(
    "podgate_listeners_unwatched",
    "gauge",
    "Listeners of a pod from before podgate watched it that do not tell when they close.",
    ("namespace", "pod"),
)

RULE_HITS = Family(
    "podgate_rule_hits_total",
    "counter",
    "Opening packets that a rule of a policy let in, over all gates.",
    ("policy", "sender", "protocol", "ports"),
)
POLICY_PROBLEMS = Family(
    "podgate_policy_problems",
    "gauge",
    "Policies, or sources of policies, that are not in force as they stand; `podgate rules` says "
    "which.",
)

FAMILIES = (
    *(GATE_PACKETS, NODE_REFUSALS, REFUSALS_UNTOLD, GATES, POD_CONDITION, MANIFEST_PROBLEM, INFO),
    *(LOAD_SECONDS, ATTACH_SECONDS, GATES_LOST, GATES_MOVED, PROBES, PROBE_SECONDS),
    *(SELF_TESTS, SELF_TEST_PATHS, UNCONFIRMED_ADDRESSES, OLDER_FLOWS, OLDER_FLOWS_ENDED),
    *(PROBES_IN_FLIGHT, PROBES_WAITING, PROBE_DELAY_SECONDS),
    *(LISTENER_HINTS, LISTENER_EVENTS_LOST, LISTENERS_UNWATCHED),
    *(RULE_HITS, POLICY_PROBLEMS, UNGATED_SECONDS),
)


class GateSample(msgspec.Struct, frozen=True):
    """One gate at scrape time."""

    pod: Pod
    interface: str
    counts: Counts


class RuleSample(msgspec.Struct, frozen=True):
    """One rule at scrape time."""

    policy: str
    sender: str
    protocol: str
    ports: str
    hits: int


class _ScrapeTimeCollector:
    """Series read from what is there now, so they vanish with their pod."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self.gates: list[GateSample] = []
        self.pods: list[Pod] = []
        self.rules: list[RuleSample] = []
        self.metrics: Metrics | None = None

    def collect(self) -> Iterator[core.Metric]:
        packets = family(GATE_PACKETS)
        modes = family(GATES)
        by_mode: dict[str, int] = {}
        for gate in self.gates:
            by_mode[gate.pod.mode.label] = by_mode.get(gate.pod.mode.label, 0) + 1
            for (verdict, reason), count in gate.counts.items():
                labels = (gate.pod.namespace, gate.pod.name, gate.interface)
                packets.add_metric((*labels, verdict.label, reason.label), count)
        for mode, number in sorted(by_mode.items()):
            modes.add_metric((mode,), number)
        yield packets
        yield modes
        if self.metrics is not None:
            yield from self._node(self.metrics)
        yield from self._pods()
        yield from self._rules()
        if self.metrics is not None:
            yield from self._probes(self.metrics)

    def _node(self, metrics: "Metrics") -> Iterator[core.Metric]:
        refusals = family(NODE_REFUSALS)
        for reason, count in sorted(metrics.node_refusals.items()):
            refusals.add_metric((reason,), count)
        yield refusals
        untold = family(REFUSALS_UNTOLD)
        untold.add_metric((), metrics.refusals_untold)
        yield untold
        problems = family(POLICY_PROBLEMS)
        problems.add_metric((), metrics.policy_problems)
        yield problems

    def _probes(self, metrics: "Metrics") -> Iterator[core.Metric]:
        for one, value in zip(
            (PROBES_IN_FLIGHT, PROBES_WAITING, LISTENER_EVENTS_LOST),
            (*metrics.probe_load(), metrics.listener_events_lost),
            strict=True,
        ):
            metric = family(one)
            metric.add_metric((), value)
            yield metric
        unwatched = family(LISTENERS_UNWATCHED)
        for pod in self.pods:
            if count := metrics.unwatched_listeners.get(pod.uid):
                unwatched.add_metric((pod.namespace, pod.name), count)
        yield unwatched

    def _rules(self) -> Iterator[core.Metric]:
        hits = family(RULE_HITS)
        for rule in self.rules:
            hits.add_metric((rule.policy, rule.sender, rule.protocol, rule.ports), rule.hits)
        yield hits

    def _pods(self) -> Iterator[core.Metric]:
        conditions = family(POD_CONDITION)
        problems = family(MANIFEST_PROBLEM)
        for pod in self.pods:
            for kind in TYPES:
                if condition := self._conditions.get(pod.uid, kind):
                    labels = (pod.namespace, pod.name, kind, condition.status, condition.reason)
                    conditions.add_metric(labels, 1)
            if pod.manifest_problem:
                problems.add_metric((pod.source, pod.manifest_problem.reason), 1)
        yield conditions
        yield problems
        yield self._paths()
        yield self._unconfirmed()
        yield self._older_flows()

    def _older_flows(self) -> core.Metric:
        flows = family(OLDER_FLOWS)
        for pod in self.pods:
            if count := self.metrics.older_flows.get(pod.uid) if self.metrics else None:
                flows.add_metric((pod.namespace, pod.name), count)
        return flows

    def _unconfirmed(self) -> core.Metric:
        addresses = family(UNCONFIRMED_ADDRESSES)
        for pod in self.pods:
            if count := self.metrics.unconfirmed_addresses.get(pod.uid) if self.metrics else None:
                addresses.add_metric((pod.namespace, pod.name), count)
        return addresses

    def _paths(self) -> core.Metric:
        paths = family(SELF_TEST_PATHS)
        for pod in self.pods:
            results = self.metrics.paths.get(pod.uid, []) if self.metrics else []
            for result in sorted(set(results)):
                paths.add_metric((pod.namespace, pod.name, result), results.count(result))
        return paths


class Metrics:
    """All series of one agent, in a registry of its own."""

    def __init__(self, conditions: Conditions) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._scraped = _ScrapeTimeCollector(conditions)
        self.registry.register(self._scraped)
        self._info = self._gauge(INFO)
        self._load = self._gauge(LOAD_SECONDS)
        self.attach_seconds = self._histogram(ATTACH_SECONDS, _ATTACH_BUCKETS)
        self.ungated_seconds = self._histogram(UNGATED_SECONDS, _UNGATED_BUCKETS)
        self.gates_lost = self._counter(GATES_LOST)
        self.gates_moved = self._counter(GATES_MOVED)
        self.self_tests = self._counter(SELF_TESTS)
        self.paths: dict[str, list[str]] = {}
        """By pod uid: the last result for each address."""
        self.unconfirmed_addresses: dict[str, int] = {}
        """By pod uid."""
        self.older_flows: dict[str, int] = {}
        """By pod uid."""
        self.older_flows_ended = self._counter(OLDER_FLOWS_ENDED)
        self._probes = self._counter(PROBES)
        self._probe_seconds = self._histogram(PROBE_SECONDS, _PROBE_BUCKETS)
        self.probe_delay_seconds = self._histogram(PROBE_DELAY_SECONDS, _DELAY_BUCKETS)
        self.listener_hints = self._counter(LISTENER_HINTS)
        self.probe_load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Probes in flight and waiting, asked for at scrape time."""
        self.listener_events_lost = 0
        self.node_refusals: dict[str, int] = {}
        """By reason."""
        self.refusals_untold = 0
        self.policy_problems = 0
        self.unwatched_listeners: dict[str, int] = {}
        """By pod uid."""
        self._scraped.metrics = self
        prometheus_client.ProcessCollector(registry=self.registry)

    def describe_agent(
        self, *, source_hash: str, attachment: str, was_compiled: bool, load_seconds: float
    ) -> None:
        self._info.labels(VERSION, source_hash, attachment).set(1)
        self._load.labels(str(was_compiled).lower()).set(load_seconds)

    def count_probe(
        self, pod: Pod, *, container: str, probe_type: str, result: str, seconds: float
    ) -> None:
        """probe_type and result in the kubelet's words: Readiness, successful."""
        self._probes.labels(probe_type, result, container, pod.name, pod.namespace, pod.uid).inc()
        self._probe_seconds.labels(probe_type, container, pod.name, pod.namespace).observe(seconds)

    def forget(self, pod: Pod) -> None:
        """Drop the series of a pod that is gone."""
        labels = {"pod": pod.name, "namespace": pod.namespace}
        self._probes.remove_by_labels(labels)
        self._probe_seconds.remove_by_labels(labels)

    def render(
        self, pods: Iterable[Pod], gates: Iterable[GateSample], rules: Iterable[RuleSample] = ()
    ) -> bytes:
        """The text exposition of everything."""
        self._scraped.rules = list(rules)
        self._scraped.pods = list(pods)
        self._scraped.gates = list(gates)
        return prometheus_client.generate_latest(self.registry)

    def _gauge(self, family: Family) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(
            family.name, family.help, family.labels, registry=self.registry
        )

    def _counter(self, family: Family) -> prometheus_client.Counter:
        return prometheus_client.Counter(
            family.name, family.help, family.labels, registry=self.registry
        )

    def _histogram(self, family: Family, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            family.name, family.help, family.labels, buckets=buckets, registry=self.registry
        )


def family(of: Family) -> core.CounterMetricFamily | core.GaugeMetricFamily:
    """Without samples yet."""
    kind = core.CounterMetricFamily if of.kind == "counter" else core.GaugeMetricFamily
    return kind(of.name, of.help, labels=of.labels)

"""Metrics of probes and of the listeners that trigger them."""

from collections.abc import Iterator

from prometheus_client import Counter, core

from agent.metrics import Histogram, MetricFamily, counter, histogram, labelled, single
from agent.pods.pod import Pod
from agent.pods.store import PodStore

# Probes answer in well under a millisecond on a healthy node and end at their timeout.
_PROBE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10)
# Microseconds while the loop is idle; where it is seconds, the concurrency limit delays probes.
_DELAY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5)

PROBES = MetricFamily(
    "prober_probe_total",
    "counter",
    "Probes by result, with the kubelet's names and labels.",
    ("probe_type", "result", "container", "pod", "namespace", "pod_uid"),
)
PROBE_SECONDS = MetricFamily(
    "prober_probe_duration_seconds",
    "histogram",
    "Duration of probes, with the kubelet's names and labels.",
    ("probe_type", "container", "pod", "namespace"),
)
FIRST_SUCCESS = MetricFamily(
    "podgate_probe_first_success_seconds",
    "histogram",
    "Time from a container's start to the first success of its probe, by type, of containers that "
    "started while this agent ran. Needs the container runtime.",
    ("probe_type",),
)
PROBES_IN_FLIGHT = MetricFamily("podgate_probes_in_flight", "gauge", "Probes currently running.")
PROBES_QUEUED = MetricFamily(
    "podgate_probes_queued", "gauge", "Probes due but delayed by the concurrency limit."
)
PROBE_START_DELAY = MetricFamily(
    "podgate_probe_start_delay_seconds",
    "histogram",
    "Delay between a probe's scheduled and actual start, of probes that connect.",
)
LISTENER_EVENTS = MetricFamily(
    "podgate_listener_events_total",
    "counter",
    "Listener events of probed pods, by kind (open, close) and result of the check.",
    ("kind", "result"),
)
LISTENER_EVENTS_LOST = MetricFamily(
    "podgate_listener_events_lost_total",
    "counter",
    "Listener events lost because the buffer was full; scheduled probes are not affected.",
)
LISTENERS_UNWATCHED = MetricFamily(
    "podgate_listeners_unwatched",
    "gauge",
    "Listeners opened before podgate watched the pod; their closing triggers no probe.",
    ("namespace", "pod"),
)
# A container takes from a tenth of a second to minutes.
_FIRST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ProbeMetrics:
    """Counters of probes and listeners; a pod's series are removed with the pod."""

    def __init__(self, store: PodStore) -> None:
        self._store = store
        self._probes = counter(PROBES)
        self._probe_seconds = histogram(PROBE_SECONDS, _PROBE_BUCKETS)
        self._successes: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        """By pod's uid, container and type: finding them by their labels takes 10 us."""
        self._first_success = histogram(FIRST_SUCCESS, _FIRST_BUCKETS)
        self.start_delay = histogram(PROBE_START_DELAY, _DELAY_BUCKETS)
        self.listener_events = counter(LISTENER_EVENTS)
        self.listener_events_lost = 0
        self.unwatched_listeners: dict[str, int] = {}
        """By pod's uid."""

    def count_probe(
        self, pod: Pod, *, container: str, probe_type: str, result: str, seconds: float
    ) -> None:
        """probe_type and result in the kubelet's words: Readiness, successful."""
        self._probes.labels(probe_type, result, container, pod.name, pod.namespace, pod.uid).inc()
        self._probe_seconds.labels(probe_type, container, pod.name, pod.namespace).observe(seconds)

    def count_successes(
        self, pod: Pod, *, container: str, probe_type: str, seconds: list[float]
    ) -> None:
        """Many at once, by their durations."""
        found = self._successes.get((pod.uid, container, probe_type))
        if found is None:
            labels = (container, pod.name, pod.namespace)
            found = (
                self._probes.labels(probe_type, "successful", *labels, pod.uid),
                self._probe_seconds.labels(probe_type, *labels),
            )
            self._successes[pod.uid, container, probe_type] = found
        counted, durations = found
        counted.inc(len(seconds))
        durations.observe_all(seconds)

    def observe_first_success(self, probe_type: str, seconds: float) -> None:
        self._first_success.labels(probe_type).observe(seconds)

    def forget(self, pod: Pod) -> None:
        """Remove the series of a deleted pod."""
        for key in [key for key in self._successes if key[0] == pod.uid]:
            del self._successes[key]
        labels = {"pod": pod.name, "namespace": pod.namespace}
        self._probes.remove_by_labels(labels)
        self._probe_seconds.remove_by_labels(labels)

    def collect(self, *, in_flight: int, queued: int) -> Iterator[core.Metric]:
        yield from self._probes.collect()
        yield from self._probe_seconds.collect()
        yield from self._first_success.collect()
        yield from self.start_delay.collect()
        yield from self.listener_events.collect()
        yield single(PROBES_IN_FLIGHT, in_flight)
        yield single(PROBES_QUEUED, queued)
        yield single(LISTENER_EVENTS_LOST, self.listener_events_lost)
        yield labelled(
            LISTENERS_UNWATCHED,
            (
                ((pod.namespace, pod.name), count)
                for pod in self._store.desired_pods()
                if (count := self.unwatched_listeners.get(pod.uid))
            ),
        )

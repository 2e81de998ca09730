"""Prometheus metrics of a cluster's node, read at scrape time."""

from collections.abc import Iterator

from prometheus_client import core

from agent.app.cluster_outputs import ClusterOutputs
from agent.metrics import MetricFamily, labelled, single
from agent.sources.cluster import ClusterSource

WATCH_HEALTHY = MetricFamily(
    "podgate_watch_healthy",
    "gauge",
    "1 if the API server's resource is watched without an error.",
    ("resource",),
)
WATCH_AGE = MetricFamily(
    "podgate_watch_age_seconds",
    "gauge",
    "Time since the API server last sent something about a resource; bookmarks come about once a "
    "minute. Absent for a resource that the server lacks.",
    ("resource",),
)
PATCHES = MetricFamily(
    "podgate_api_patches_total",
    "counter",
    "Condition patches sent to the API server, by status code; none without a response.",
    ("code",),
)
PENDING = MetricFamily(
    "podgate_api_pods_pending",
    "gauge",
    "Pods whose conditions in the API server are not up to date.",
)
PENDING_SECONDS = MetricFamily(
    "podgate_api_pending_seconds",
    "gauge",
    "For how long the API server's conditions of a pod have not been up to date; of the longest.",
)
EVENTS = MetricFamily(
    "podgate_api_events_total", "counter", "Event requests accepted by the API server."
)
EVENTS_DROPPED = MetricFamily(
    "podgate_api_events_dropped_total", "counter", "Events discarded without being sent."
)

# There from the start, or an alert's increase() would not see the first rejection.
_PATCH_CODES = dict.fromkeys(("200", "401", "403", "none"), 0)


class ClusterCollector:
    """Collects them; to be registered once."""

    def __init__(self, source: ClusterSource, outputs: ClusterOutputs) -> None:
        self._source = source
        self._outputs = outputs

    def collect(self) -> Iterator[core.Metric]:
        source, writer, recorder = self._source, self._outputs.writer, self._outputs.recorder
        problems = source.watch_problems
        yield labelled(
            WATCH_HEALTHY, (((name,), name not in problems) for name in sorted(source.watched))
        )
        yield labelled(
            WATCH_AGE, (((name,), age) for name, age in sorted(source.watch_ages.items()))
        )
        patches = {**_PATCH_CODES, **writer.patches_by_code}
        yield labelled(PATCHES, (((code,), count) for code, count in sorted(patches.items())))
        yield single(PENDING, writer.pending)
        yield single(PENDING_SECONDS, writer.oldest_pending_seconds)
        yield single(EVENTS, recorder.sent)
        yield single(EVENTS_DROPPED, recorder.dropped)

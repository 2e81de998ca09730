"""Prometheus metrics of service endpoints, read at scrape time."""

import datetime
from collections.abc import Iterator

from prometheus_client import core

from agent.metrics import MetricFamily, single
from agent.services.api.source import ServiceEndpoints

SERVICES = MetricFamily("podgate_services", "gauge", "Services that the source has.")
REVISIONS = MetricFamily(
    "podgate_services_revisions_total",
    "counter",
    "Revisions of service endpoints that were published since the start, of all views.",
)
SOURCE_UP = MetricFamily(
    "podgate_services_source_up",
    "gauge",
    "1 if the source of services (API server, files, another podgate) can be read and has no "
    "invalid part. Otherwise the last known services are served.",
)
SAVED_AGE = MetricFamily(
    "podgate_services_saved_age_seconds",
    "gauge",
    "Age of the saved services that are served until the source has confirmed them; 0 if it has.",
)
REMOTE_CALLS = MetricFamily(
    "podgate_services_remote_calls",
    "gauge",
    "Open calls of other nodes, about one for each node that reads its services here.",
)


class ServiceCollector:
    """Collects them; to be registered once."""

    def __init__(self, endpoints: ServiceEndpoints) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterator[core.Metric]:
        found = self._endpoints
        age = datetime.timedelta()
        if found.saved_at:
            age = datetime.datetime.now(datetime.UTC) - found.saved_at
        yield single(SERVICES, len(found.source.services))
        yield single(REVISIONS, found.publisher.rev)
        yield single(SOURCE_UP, not found.source.problems)
        yield single(SAVED_AGE, age.total_seconds())
        if found.nodes_server:
            yield single(REMOTE_CALLS, found.nodes_server.calls)

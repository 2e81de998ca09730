"""The proxy's own metrics; those named kubeproxy_* mean what they mean in kube-proxy
(pkg/proxy/metrics), for both address families at once."""

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import core

from agent.metrics import MetricFamily, counter, histogram, labelled, single
from agent.services.client.v1alpha1 import endpoints_pb2
from agent.services.proxy.health import ProxyHealth

# kube-proxy's: 1 ms to 16 s.
_SYNC_BUCKETS = tuple(0.001 * 2**exponent for exponent in range(15))

SYNC_SECONDS = MetricFamily(
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "histogram",
    "Service proxy: time to write one change to the kernel.",
)
LAST_SYNC = MetricFamily(
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
    "gauge",
    "Service proxy: time of the last successful write, in seconds since the epoch.",
)
LAST_QUEUED = MetricFamily(
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
    "gauge",
    "Service proxy: time when the newest state arrived, in seconds since the epoch.",
)
NO_LOCAL_ENDPOINTS = MetricFamily(
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
    "gauge",
    "Service proxy: service ports with a Local traffic policy, no endpoint on this node, and "
    "endpoints on others.",
    ("traffic_policy",),
)
HEALTHZ_RESPONSES = MetricFamily(
    "kubeproxy_proxy_healthz_total", "counter", "Service proxy: responses of /healthz.", ("code",)
)
LIVEZ_RESPONSES = MetricFamily(
    "kubeproxy_proxy_livez_total", "counter", "Service proxy: responses of /livez.", ("code",)
)
REVISION = MetricFamily(
    "podgate_proxy_revision",
    "gauge",
    "Service proxy: revision of the service endpoints API that is in the kernel.",
)
REVISIONS = MetricFamily(
    "podgate_proxy_revisions_total",
    "counter",
    "Service proxy: states received from the service endpoints API.",
)
SERVICE_CHANGES = MetricFamily(
    "podgate_proxy_service_changes_total",
    "counter",
    "Service proxy: services that were new, different or gone in a received state.",
)
FRONTEND_CHANGES = MetricFamily(
    "podgate_proxy_frontend_changes_total",
    "counter",
    "Service proxy: service addresses written to the kernel or removed from it.",
    ("change",),
)
PROGRAMMING_SECONDS = MetricFamily(
    "podgate_proxy_programming_duration_seconds",
    "histogram",
    "Service proxy: time from the arrival of a state until the kernel has it, with all attempts.",
)
SYNC_FAILURES = MetricFamily(
    "podgate_proxy_sync_failures_total",
    "counter",
    "Service proxy: failed writes to the kernel, which are retried.",
)
REPAIRS = MetricFamily(
    "podgate_proxy_repairs_total",
    "counter",
    "Service proxy: times that rules which another program removed were installed again.",
)
SERVICES = MetricFamily(
    "podgate_proxy_services", "gauge", "Service proxy: services in the newest state."
)


class ProxyMetrics:
    """Counts what the process does, and reads the rest from the newest state."""

    def __init__(self, health: ProxyHealth) -> None:
        self.sync_seconds = histogram(SYNC_SECONDS, _SYNC_BUCKETS)
        self.programming_seconds = histogram(PROGRAMMING_SECONDS, _SYNC_BUCKETS)
        self.revisions = counter(REVISIONS)
        self.service_changes = counter(SERVICE_CHANGES)
        self.frontend_changes = counter(FRONTEND_CHANGES)
        self.sync_failures = counter(SYNC_FAILURES)
        self.repairs = counter(REPAIRS)
        self.healthz_responses = counter(HEALTHZ_RESPONSES)
        self.livez_responses = counter(LIVEZ_RESPONSES)
        self.services: Iterable[endpoints_pb2.ServiceEndpoints] = ()
        self.revision = 0
        self.queued_at = 0.0
        self._health = health
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._registry.register(prometheus_client.ProcessCollector(registry=None))

    def collect(self) -> Iterator[core.Metric]:
        """As the registry's collector."""
        for counted in (
            self.sync_seconds,
            self.programming_seconds,
            self.revisions,
            self.service_changes,
            self.frontend_changes,
            self.sync_failures,
            self.repairs,
            self.healthz_responses,
            self.livez_responses,
        ):
            yield from counted.collect()
        services = tuple(self.services)
        yield single(LAST_SYNC, self._health.updated_at)
        yield single(LAST_QUEUED, self.queued_at)
        yield single(REVISION, self.revision)
        yield single(SERVICES, len(services))
        yield labelled(
            NO_LOCAL_ENDPOINTS,
            [
                (("internal",), sum(map(_ports_without_internal, services))),
                (("external",), sum(map(_ports_without_external, services))),
            ],
        )

    def exposition(self) -> bytes:
        """All series, in Prometheus' text format. Takes milliseconds for thousands of services."""
        content: bytes = prometheus_client.generate_latest(self._registry)
        return content


def _ports_without_internal(service: endpoints_pb2.ServiceEndpoints) -> int:
    if service.internal_traffic_policy != endpoints_pb2.TRAFFIC_POLICY_LOCAL:
        return 0
    return sum(
        port.has_endpoints_anywhere and not any(e.is_internal for e in port.endpoints)
        for port in service.ports
    )


def _ports_without_external(service: endpoints_pb2.ServiceEndpoints) -> int:
    is_local = service.external_traffic_policy == endpoints_pb2.TRAFFIC_POLICY_LOCAL
    has_addresses = service.external_ips or service.load_balancer_ips
    return sum(
        port.has_endpoints_anywhere and not any(e.is_external for e in port.endpoints)
        for port in service.ports
        if is_local and (port.node_port or has_addresses)
    )

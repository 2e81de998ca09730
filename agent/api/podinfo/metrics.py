"""Metrics of PodInfo and the pods API.

Names of KEP-4188 and of the kubelet (1.37, pkg/kubelet/metrics) where they mean the same.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import core

from agent.api.podinfo import methods
from agent.api.podinfo.methods import GET, LIST, WATCH
from agent.metrics import MetricFamily, labelled, single


class PodInfoFigures(Protocol):
    """What a server counts, as of `PodInfoServer`."""

    requests: collections.Counter[str]
    errors: collections.Counter[tuple[str, str]]

    @property
    def watches(self) -> int: ...

    @property
    def pauses(self) -> int: ...

    @property
    def rejected(self) -> Mapping[str, int]: ...


class NoPodInfoClients:
    """Of a server that is not started, since no client has connected."""

    watches = pauses = 0

    def __init__(self) -> None:
        self.requests = collections.Counter[str]()
        self.errors = collections.Counter[tuple[str, str]]()
        self.rejected = {"connections": 0}


# By the KEP's names to the letter, which its own counters have without `_total`.
KEP_REQUESTS = MetricFamily(
    "pod_info_endpoint_requests_total", "untyped", "PodInfo requests, by the name of KEP-4188."
)
KEP_REQUESTS_LIST = MetricFamily(
    "pod_info_endpoint_requests_list", "untyped", "ListPodConditions requests (KEP-4188)."
)
KEP_REQUESTS_GET = MetricFamily(
    "pod_info_endpoint_requests_get", "untyped", "GetPodConditions requests (KEP-4188)."
)
KEP_REQUESTS_WATCH = MetricFamily(
    "pod_info_endpoint_requests_watch", "untyped", "WatchPodConditions requests (KEP-4188)."
)
KEP_ERRORS_GET = MetricFamily(
    "pod_info_endpoint_errors_get", "untyped", "Failed GetPodConditions requests (KEP-4188)."
)
# The KEP has no more; these follow its pattern.
KEP_ERRORS_LIST = MetricFamily(
    "pod_info_endpoint_errors_list", "untyped", "Failed ListPodConditions requests."
)
KEP_ERRORS_WATCH = MetricFamily(
    "pod_info_endpoint_errors_watch", "untyped", "Failed WatchPodConditions requests."
)
REQUESTS = MetricFamily(
    "podgate_podinfo_requests_total", "counter", "PodInfo requests, by method.", ("method",)
)
ERRORS = MetricFamily(
    "podgate_podinfo_errors_total",
    "counter",
    "Failed PodInfo requests, by method and gRPC status.",
    ("method", "status_code"),
)
WATCHES = MetricFamily("podgate_podinfo_watches", "gauge", "Open PodInfo watches.")
REJECTED = MetricFamily(
    "podgate_podinfo_rejected_total",
    "counter",
    "PodInfo connections and requests rejected by a limit, by limit.",
    ("reason",),
)
PAUSES = MetricFamily(
    "podgate_podinfo_pauses_total",
    "counter",
    "Times that connections of a PodInfo user were not read for a while: it sent too much.",
)
_KUBELET_LABELS = ("server_api_version", "status_code")
KUBELET_REQUESTS = MetricFamily(
    "kubelet_pod_requests_total",
    "counter",
    "Requests to podgate's pods API that have ended, by status, by the kubelet's name.",
    _KUBELET_LABELS,
)
KUBELET_REQUESTS_LIST = MetricFamily(
    "kubelet_pod_requests_list_total",
    "counter",
    "ListPods requests that have ended, by status.",
    _KUBELET_LABELS,
)
KUBELET_REQUESTS_GET = MetricFamily(
    "kubelet_pod_requests_get_total",
    "counter",
    "GetPod requests that have ended, by status.",
    _KUBELET_LABELS,
)
KUBELET_REQUESTS_WATCH = MetricFamily(
    "kubelet_pod_requests_watch_total",
    "counter",
    "WatchPods requests that have ended, by status.",
    _KUBELET_LABELS,
)

_VERSION = methods.PODS.partition(".")[0]


def collect_podinfo(server: PodInfoFigures) -> Iterator[core.Metric]:
    """Of the PodInfo API."""
    yield single(KEP_REQUESTS, server.requests.total())
    yield single(KEP_REQUESTS_LIST, server.requests[LIST])
    yield single(KEP_REQUESTS_GET, server.requests[GET])
    yield single(KEP_REQUESTS_WATCH, server.requests[WATCH])
    failed = dict.fromkeys((GET, LIST, WATCH), 0)
    for (method, _), count in server.errors.items():
        failed[method] += count
    yield single(KEP_ERRORS_GET, failed[GET])
    yield single(KEP_ERRORS_LIST, failed[LIST])
    yield single(KEP_ERRORS_WATCH, failed[WATCH])
    yield labelled(REQUESTS, (((method,), server.requests[method]) for method in failed))
    yield labelled(ERRORS, sorted(server.errors.items()))
    yield single(WATCHES, server.watches)
    yield single(PAUSES, server.pauses)
    rejected = sorted(server.rejected.items())
    yield labelled(REJECTED, (((limit,), count) for limit, count in rejected))


def collect_pods_api(requests: Mapping[tuple[str, str], int]) -> Iterator[core.Metric]:
    """Of the kubelet's pods API as podgate serves it. requests: that have ended, by method and
    status."""
    ended = sorted(requests.items())
    totals: dict[tuple[str, str], int] = {}
    for (_, status), count in ended:
        totals[_VERSION, status] = totals.get((_VERSION, status), 0) + count
    yield labelled(KUBELET_REQUESTS, totals.items())
    for family, method in (
        (KUBELET_REQUESTS_LIST, methods.LIST_PODS),
        (KUBELET_REQUESTS_GET, methods.GET_POD),
        (KUBELET_REQUESTS_WATCH, methods.WATCH_PODS),
    ):
        of_method = (((_VERSION, status), count) for (one, status), count in ended if one == method)
        yield labelled(family, of_method)

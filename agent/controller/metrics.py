"""Metrics of the controller."""

from collections.abc import Callable, Iterator
from typing import Final

import prometheus_client
from prometheus_client import core, registry

from agent.metrics import MetricFamily, single

_LEADING: Final = MetricFamily(
    "podgate_controller_leading",
    "gauge",
    "Whether this replica of the controller holds the Lease and writes.",
)
_CERTIFICATE_VALID: Final = MetricFamily(
    "podgate_controller_webhook_certificate_valid",
    "gauge",
    "Whether the webhook has a certificate that is valid now; without one pods are not reviewed.",
)


class _Replica(registry.Collector):
    def __init__(
        self, is_leading: Callable[[], bool], is_certificate_valid: Callable[[], bool | None]
    ) -> None:
        self._is_leading = is_leading
        self._is_certificate_valid = is_certificate_valid

    def collect(self) -> Iterator[core.Metric]:
        yield single(_LEADING, self._is_leading())
        is_valid = self._is_certificate_valid()
        if is_valid is not None:
            yield single(_CERTIFICATE_VALID, is_valid)


def new_registry(
    is_leading: Callable[[], bool], is_certificate_valid: Callable[[], bool | None]
) -> prometheus_client.CollectorRegistry:
    """All metrics of one replica. is_certificate_valid: None without a webhook."""
    made = prometheus_client.CollectorRegistry()
    made.register(_Replica(is_leading, is_certificate_valid))
    prometheus_client.ProcessCollector(registry=made)
    return made

"""Whether the proxy keeps up with the service endpoints API (kube-proxy, pkg/proxy/healthcheck)."""

import datetime
import time
from collections.abc import Callable
from typing import Any

# Twice kube-proxy's --iptables-sync-period (cmd/kube-proxy/app/server.go).
LATE_SECONDS = 60.0
_FAMILIES = ("IPv4", "IPv6")


class ProxyHealth:
    """Healthy unless a state has been waiting for the kernel for a minute.

    Also before the first state, as kube-proxy: what the previous process installed is in use.
    clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._queued_at: float | None = None
        self._updated_at = clock()

    def queued(self) -> None:
        """A new state has arrived."""
        if self._queued_at is None:
            self._queued_at = self._clock()

    def updated(self) -> None:
        """The newest state is in the kernel."""
        self._queued_at = None
        self._updated_at = self._clock()

    @property
    def is_healthy(self) -> bool:
        """Whether the kernel has a state that is at most a minute older than the newest."""
        return self._queued_at is None or self._clock() - self._queued_at < LATE_SECONDS

    @property
    def updated_at(self) -> float:
        """When a state was last written, or the process started."""
        return self._updated_at

    def report(self) -> dict[str, Any]:
        """What /healthz and /livez respond.

        kube-proxy's `nodeEligible`, of /healthz, is left out: the API has no taints of nodes.
        """
        is_healthy, now = self.is_healthy, _text(self._clock())
        updated = _text(self._updated_at)
        # One process writes both families at once.
        own = {"lastUpdated": updated, "healthy": is_healthy}
        return {
            # Of a healthy proxy it is the present (pkg/proxy/healthcheck/proxy_health.go).
            "lastUpdated": now if is_healthy else updated,
            "currentTime": now,
            "healthy": is_healthy,
            "status": dict.fromkeys(_FAMILIES, own),
        }


def _text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")

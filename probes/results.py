"""Results of probes."""

from enum import StrEnum

import msgspec


class ProbeResult(StrEnum):
    """The four results of pkg/probe/probe.go, in the kubelet's own words."""

    SUCCESS = "success"
    WARNING = "warning"
    """Counts as success, and is reported as an Event: a redirect away from the pod."""
    FAILURE = "failure"
    UNKNOWN = "unknown"
    """Counts as failure; a startup probe's value before its first result."""

    @property
    def passed(self) -> bool:
        """Success or Warning (pkg/kubelet/prober/prober.go `probe`)."""
        return self is ProbeResult.SUCCESS or self is ProbeResult.WARNING

    def counted(self) -> "ProbeResult":
        """The result as thresholds and the cache see it: only Success or Failure."""
        return ProbeResult.SUCCESS if self.passed else ProbeResult.FAILURE


class ExchangeResult(msgspec.Struct, frozen=True):
    """The result of one exchange with one address, and its message."""

    result: ProbeResult
    message: str = ""
    """The kubelet's text; for a success the response body (at most 10 KiB)."""
    error: bool = False
    """The prober failed, not the pod: retried at once, then discarded."""
    is_redirected: bool = False
    """Another process than the pod's server accepted: discarded, without a retry. An error, too."""
    lacks_certificate: bool = False
    """The probe's client certificate is missing, unusable or rejected: as the field above."""


class ProbeOutcome(msgspec.Struct, frozen=True):
    """One finished probe."""

    result: ProbeResult
    message: str = ""
    error: bool = False
    """As in ExchangeResult: such a result is never counted (pkg/kubelet/prober/worker.go)."""
    duration_seconds: float = 0.0
    address: str | None = None
    """The pod address that gave this result; None if none was reached or dialled."""
    other_address: str | None = None
    """With a dual-stack policy, where both families passed: the second one's."""
    is_redirected: bool = False
    """As in ExchangeResult."""
    lacks_certificate: bool = False
    """As in ExchangeResult."""
    is_looked_up: bool = False
    """Found by a lookup of the listener, not by a connection (probes/engine/lookups.py). Then the
    duration is that of the first lookup since the newest connection."""

    @property
    def passed(self) -> bool:
        return self.result.passed

    @property
    def shows_nothing(self) -> bool:
        """Whether it got to no application, for a reason that another attempt does not change."""
        return self.is_redirected or self.lacks_certificate

    @property
    def families(self) -> tuple[str, ...]:
        """The families that gave this result: IPv4, IPv6, both or none."""
        addresses = (self.address, self.other_address)
        return tuple("IPv6" if ":" in address else "IPv4" for address in addresses if address)

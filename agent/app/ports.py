"""The agent's ports for HTTP, and why they are not open, for reports and metrics."""

from collections.abc import Iterator

from agent.serving.ports import Port
from agent.settings import Settings


class Ports:
    """http: for this machine; metrics: for other machines, None where they are not served."""

    def __init__(self, settings: Settings) -> None:
        self.http = Port((settings.http_host, settings.http_port), "--http-address")
        self.metrics: Port | None = None
        if settings.metrics_address is not None:
            self.metrics = Port(settings.metrics_address, "--metrics-address")

    def problems(self) -> Iterator[str]:
        """One sentence each."""
        if self.http.problem:
            yield f"Metrics and health are not served to this machine: {self.http.problem}."
        if self.metrics and self.metrics.problem:
            yield f"Metrics are not served to other machines: {self.metrics.problem}."

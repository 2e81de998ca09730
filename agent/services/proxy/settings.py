"""Settings of the proxy's process."""

import dataclasses
import pathlib

from agent.services.proxy.node_addresses import NodeAddressSelection


@dataclasses.dataclass(frozen=True, slots=True)
class ProxySettings:
    """What the process follows and serves."""

    target: str
    """gRPC target of the service endpoints API."""
    service_proxy_name: str = ""
    """Services with this value of the label service.kubernetes.io/service-proxy-name; empty: those
    without the label."""
    node_addresses: NodeAddressSelection = dataclasses.field(default_factory=NodeAddressSelection)
    metrics_address: tuple[str, int] | None = None
    healthz_address: tuple[str, int] | None = None
    started_file: pathlib.Path | None = None
    """Created when the first state is in the kernel."""

"""Service meshes in a pod, by the ports at which their proxies listen.

Sources: istio (pkg/config/constants, tools/istio-iptables), ztunnel (src/config.rs), linkerd2
(proxy-init), consul-k8s (control-plane/connect-inject/constants), kuma (app/kuma-dp).
"""

from collections.abc import Set

_ENVOY_OUTBOUND, _ENVOY_INBOUND, _HBONE = 15001, 15006, 15008
_LINKERD_OUTBOUND, _LINKERD_INBOUND = 4140, 4143
_CONSUL_INBOUND = 20000
_ISTIO_OWN = frozenset({15020, 15021, 15090})
"""The sidecar's status, health and metrics, which ztunnel does not serve in pods."""

PROXY_PORTS = frozenset(
    {_ENVOY_OUTBOUND, _ENVOY_INBOUND, _HBONE, _LINKERD_OUTBOUND, _LINKERD_INBOUND}
)
"""Ports to which meshes redirect a pod's connections."""


def name(listening: Set[int]) -> str:
    """The mesh whose proxy listens at these ports of a pod; empty if none is recognised."""
    if listening >= {_LINKERD_OUTBOUND, _LINKERD_INBOUND}:
        return "Linkerd"
    if _ENVOY_INBOUND in listening and listening & _ISTIO_OWN:
        return "Istio"
    if listening >= {_ENVOY_INBOUND, _HBONE}:
        return "Istio ambient"
    if listening >= {_ENVOY_OUTBOUND, _CONSUL_INBOUND}:
        return "Consul"
    if listening & {_ENVOY_OUTBOUND, _ENVOY_INBOUND}:
        return "a mesh with Envoy"
    return ""

"""The pod's networks by name: the annotation that the multi-network plugin writes.

Network Plumbing Working Group, "Kubernetes Network Custom Resource Definition De-facto Standard",
section 5: a JSON list of `{"name", "interface", ...}`. It names interfaces only; podgate reads
their addresses from the pod's own namespace.
"""

from collections.abc import Mapping

import msgspec

STATUS_ANNOTATION = "k8s.v1.cni.cncf.io/network-status"

_MAX_CHARS = 64 * 1024


class _Network(msgspec.Struct):
    name: str
    interface: str = ""


def read(text: object) -> Mapping[str, str]:
    """Interfaces by network, as `namespace/name`; empty for what is not valid."""
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        return {}
    try:
        networks = msgspec.json.decode(text, type=list[_Network])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return {network.name: network.interface for network in networks if network.interface}

"""The User-Agent headers of probes and hooks."""

KUBELET_VERSION = "1.36"
"""Major and minor version of the kubelet whose behaviour these probes follow.

Servers distinguish probes from users by the prefix `kube-probe/`; no server is known to use the
number.
"""

PROBE_USER_AGENT = f"kube-probe/{KUBELET_VERSION}"
"""pkg/probe/http/request.go `userAgent`, and pkg/probe/grpc/grpc.go."""

HOOK_USER_AGENT = f"kube-lifecycle/{KUBELET_VERSION}"
"""pkg/kubelet/lifecycle/handlers.go, by the same function."""

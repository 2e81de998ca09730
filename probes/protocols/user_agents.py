"""How probes introduce themselves."""

KUBELET_VERSION = "1.36"
"""Major and minor of the kubelet whose behaviour these probes follow.

Servers tell probes from users by the `kube-probe/` prefix; none is known to
read the number.
"""

PROBE_USER_AGENT = f"kube-probe/{KUBELET_VERSION}"
"""pkg/probe/http/request.go `userAgent`, and pkg/probe/grpc/grpc.go."""

HOOK_USER_AGENT = f"kube-lifecycle/{KUBELET_VERSION}"
"""pkg/kubelet/lifecycle/handlers.go, by the same function."""

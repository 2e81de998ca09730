"""Pods as NRI reports them, as the sandboxes of the container runtime that they are."""

from agent.cri.models import NetworkedSandbox, Sandbox, addresses_of
from agent.nri import nri_pb2

_NETWORK = "network"


def read(pod: nri_pb2.PodSandbox) -> NetworkedSandbox | None:
    """None for a pod without a network namespace of its own, or not of Kubernetes.

    Addresses are missing where the runtime is older than NRI 0.7; then the namespace has them.
    """
    paths = [space.path for space in pod.linux.namespaces if space.type == _NETWORK and space.path]
    if not (paths and pod.id and pod.uid):
        return None
    sandbox = Sandbox(
        id=pod.id,
        pod_uid=pod.uid,
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        attempt=0,
        created=None,
        runtime_handler=pod.runtime_handler,
        is_ready=False,
        ips=addresses_of(pod.ips),
    )
    return NetworkedSandbox(sandbox, paths[0])

"""What a run reads of the cluster before it starts."""

import dataclasses
import urllib.parse

from agent.labels import VERIFY_LABEL
from agent.operate.kubectl import agent_pods
from agent.operate.kubectl import nodes as node_facts
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import KubectlError, Object, is_missing
from agent.operate.kubectl.nodes import ClusterNode
from agent.operate.kubectl.verification.access import Access
from agent.operate.kubectl.verification.manifests import Image

_SELECTOR = urllib.parse.quote(f"{VERIFY_LABEL}=true")
_AGENTS = urllib.parse.quote("app.kubernetes.io/name=podgate")
# Where no DaemonSet selects nodes.
_LINUX = {"nodeSelector": {"kubernetes.io/os": "linux"}}


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """daemonset: None where podgate is not installed; nodes: those to try from; labelled: Node
    objects; samples: pods that opt in."""

    daemonset: Object | None
    nodes: list[ClusterNode]
    labelled: dict[str, Object]
    agents: dict[str, AgentPod]
    namespaces: dict[str, Object]
    samples: list[Object]
    image: Image


def read(access: Access, namespace: str, samples_of: str, image: str) -> Facts:
    """namespace: podgate's; samples_of: whose pods may be tried, empty for all; image: instead of
    the DaemonSet's, or empty. Raises `KubectlError`."""
    daemonset = _daemonset(access, namespace)
    if daemonset is None and not image:
        raise KubectlError(
            f"podgate is not installed in the namespace {namespace}; to see the hole without it, "
            "name podgate's image with --image"
        )
    nodes = access.get("/api/v1/nodes")["items"]
    template = daemonset or {"spec": {"template": {"spec": _LINUX}}}
    pods = access.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={_AGENTS}")["items"]
    agents = {one.node: one for one in agent_pods.youngest(pods, "podgate")}
    if samples_of:
        namespaces = [access.get(f"/api/v1/namespaces/{samples_of}")]
        path = f"/api/v1/namespaces/{samples_of}/pods"
    else:
        namespaces = access.get("/api/v1/namespaces")["items"]
        path = "/api/v1/pods"
    return Facts(
        daemonset,
        node_facts.collect(template, nodes, ()),
        {one["metadata"]["name"]: one for one in nodes},
        agents,
        {one["metadata"]["name"]: one for one in namespaces},
        access.get(f"{path}?labelSelector={_SELECTOR}")["items"],
        Image(image) if image else _image(template),
    )


def _daemonset(access: Access, namespace: str) -> Object | None:
    try:
        return access.get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/podgate")
    except KubectlError as error:
        if is_missing(error):
            return None
        raise


def _image(daemonset: Object) -> Image:
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = (one for one in spec["containers"] if one["name"] == agent_pods.CONTAINER)
    return Image(
        container["image"],
        container.get("imagePullPolicy") or "IfNotPresent",
        tuple(one["name"] for one in spec.get("imagePullSecrets") or ()),
    )

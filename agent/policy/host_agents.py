"""Table of agents that run on the host network and connect to pods, by their public manifests.

Each is selected by namespace as well: a user who may create hostNetwork pods there administers the
cluster. An agent that is not here needs a HostAccessPolicy.
"""

import dataclasses

from agent.policy.api_types import EmptyObject, FromField, PortField, SpecField
from agent.policy.selectors import LabelSelector, PodSelector

_ALL_PODS = PodSelector(pod_selector=LabelSelector())
_ANY_TCP = (PortField(protocol="TCP"),)


@dataclasses.dataclass(frozen=True, slots=True)
class HostAgent:
    """One entry. group: what switches it off; manifest: where labels and namespace are from."""

    group: str
    name: str
    spec: SpecField
    manifest: str


def _pods(namespace: str, **labels: str) -> PodSelector:
    """Labels are written with "_" for "-"; those of `app.kubernetes.io/` without that."""
    recommended = {"name", "component", "instance"}
    named = {
        f"app.kubernetes.io/{key}" if key in recommended else key.replace("_", "-"): value
        for key, value in labels.items()
    }
    return PodSelector((namespace,), LabelSelector(named))


def _reaching(
    agent: PodSelector,
    pods: PodSelector = _ALL_PODS,
    ports: tuple[PortField, ...] = _ANY_TCP,
) -> SpecField:
    return SpecField(pods=pods, from_=(FromField(host_network_pods=agent),), ports=ports)


TABLE = (
    # Any process of the node may resolve names; that includes node-local-dns and systemd-resolved.
    HostAgent(
        "node-dns",
        "coredns",
        SpecField(
            pods=_pods("kube-system", k8s_app="kube-dns"),
            from_=(FromField(any_process=EmptyObject()),),
            ports=(PortField("UDP", "dns"), PortField("TCP", "dns-tcp")),
        ),
        "kubernetes/kubernetes cluster/addons/dns/coredns/coredns.yaml.base",
    ),
    # Its proxy of layer 7 sends requests on from the node, and its DNS proxy to CoreDNS.
    HostAgent(
        "cni",
        "cilium",
        _reaching(_pods("kube-system", k8s_app="cilium"), ports=(*_ANY_TCP, PortField("UDP", 53))),
        "cilium/cilium install/kubernetes/cilium/templates/cilium-agent/daemonset.yaml",
    ),
    HostAgent(
        "cni",
        "cilium-envoy",
        _reaching(_pods("kube-system", k8s_app="cilium-envoy")),
        "cilium/cilium install/kubernetes/cilium/templates/cilium-envoy/daemonset.yaml",
    ),
    # Clients of monitors, OSDs and metadata servers.
    *(
        HostAgent(
            "storage",
            name,
            _reaching(_pods("rook-ceph", app=name), PodSelector(("rook-ceph",))),
            f"rook/rook pkg/operator/ceph/csi/template/{directory}/{name}.yaml",
        )
        for directory, name in (("rbd", "csi-rbdplugin"), ("cephfs", "csi-cephfsplugin"))
    ),
    HostAgent(
        "storage",
        "csi-nfs-node",
        _reaching(_pods("kube-system", app="csi-nfs-node"), ports=(PortField("TCP", 2049),)),
        "kubernetes-csi/csi-driver-nfs deploy/csi-nfs-node.yaml",
    ),
    HostAgent(
        "ingress",
        "ingress-nginx",
        _reaching(_pods("ingress-nginx", name="ingress-nginx", component="controller")),
        "kubernetes/ingress-nginx deploy/static/provider/baremetal/deploy.yaml",
    ),
    HostAgent(
        "ingress",
        "traefik",
        _reaching(_pods("traefik", name="traefik")),
        "traefik/traefik-helm-chart traefik/templates/_helpers.tpl",
    ),
    # Checks the pods of its own node (agents.useHostNetwork).
    HostAgent(
        "metrics",
        "datadog",
        _reaching(
            PodSelector(("datadog",), LabelSelector({"agent.datadoghq.com/component": "agent"}))
        ),
        "DataDog/datadog-operator, label agent.datadoghq.com/component",
    ),
)

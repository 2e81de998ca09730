"""Merging of observed flows: those of pods and sources that the next roll-out replaces by equal
ones."""

import re
from collections.abc import Iterable

import msgspec

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.pods.lasting_labels import lasting_labels
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod

FlowKey = tuple[object, ...]
"""Equal for flows that one rule admits."""

# The cgroup of a pod, below which each start of a container creates another one. Only where the
# kubelet creates them (pkg/kubelet/cm/cgroup_manager_linux.go, qos_container_manager_linux.go;
# below --cgroup-root): a process must not choose its own name. A static pod's uid has no dashes.
_POD = re.compile(
    r"(?:/[^/]+)?/(?:[^/]*-)?kubepods(?:\.slice)?"
    r"(?:/(?:[^/]*-)?(?:burstable|besteffort)(?:\.slice)?)?"
    r"/(?:[^/]*-)?pod([0-9a-f]{8}[-_0-9a-f]{24,})(?:\.slice)?(?=/|$)"
)


def observed_pod(pod: Pod, labels: LabelSnapshot) -> ObservedPod:
    """labels: of namespaces."""
    return ObservedPod(
        namespace=pod.namespace,
        name=pod.name,
        labels=pod.labels,
        namespace_labels=dict(labels.of_namespace(pod.namespace)),
        host_network=pod.host_network,
        named_ports=tuple(
            (port.name, port.protocol, port.number)
            for port in pod.spec.container_ports
            if port.name
        ),
    )


def pod_uid(path: str) -> str:
    """The uid of the pod that a cgroup belongs to; empty if it is no pod's."""
    found = _POD.match(path)
    return found[1].replace("_", "-") if found else ""


def pod_cgroup(path: str) -> str:
    """The path of the pod's cgroup, of one below it; any other path unchanged."""
    found = _POD.match(path)
    return found[0] if found else path


def source_key(flows: ObservedFlows) -> FlowKey:
    """Equal for sources that are the same workload or cgroup."""
    if flows.source_pod:
        return _workload(flows.source_pod)
    return (pod_cgroup(flows.cgroup),)


def target_key(flows: ObservedFlows) -> FlowKey:
    """Equal for pods that the same labels select."""
    return _workload(flows.pod)


def flow_key(flows: ObservedFlows) -> FlowKey:
    port = (flows.protocol, flows.port, flows.has_many_ports)
    return (target_key(flows), source_key(flows), port)


def merged(one: ObservedFlows, other: ObservedFlows) -> ObservedFlows:
    """Both together: the names are those of the later one, the process is the first."""
    first, last = sorted((one, other), key=lambda flows: flows.last)
    return msgspec.structs.replace(
        last,
        packets=one.packets + other.packets,
        first=min(one.first, other.first),
        process=first.process or last.process,
        nodes=tuple(sorted({*one.nodes, *other.nodes})),
    )


def merge(all_flows: Iterable[ObservedFlows]) -> list[ObservedFlows]:
    """One of each key, in order of arrival."""
    found: dict[FlowKey, ObservedFlows] = {}
    for flows in all_flows:
        key = flow_key(flows)
        before = found.get(key)
        found[key] = merged(before, flows) if before else flows
    return list(found.values())


def _workload(pod: ObservedPod) -> FlowKey:
    return (pod.namespace, pod.host_network, tuple(lasting_labels(pod.labels).items()))

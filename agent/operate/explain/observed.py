"""A flow as it would be observed, to compare with policies. Pure functions."""

import datetime

from agent.admin.observations import ObservedFlows, ObservedPod
from agent.drops.source_processes import NO_SOCKET
from agent.operate.explain import facts
from agent.operate.explain.facts import Flow, Source
from agent.operate.explain.pods import NamedPod, NamedPods


def flows(
    source: Source,
    flow: Flow,
    pod: NamedPod,
    pods: NamedPods,
    *,
    named_ports: tuple[tuple[str, str, int], ...] = (),
) -> ObservedFlows | None:
    """One packet, now. None for a host process of which only the address is known.

    named_ports: of the pod, as in `ObservedPod`.
    """
    path = source.cgroup.path if source.cgroup else ""
    if source.origin == facts.KERNEL:
        path = NO_SOCKET
    elif not path:
        return None
    now = datetime.datetime.now(datetime.UTC)
    of_source = pods.of_cgroup(path)
    return ObservedFlows(
        pod=_observed(pod, pods, named_ports),
        protocol=flow.protocol,
        port=flow.port,
        cgroup=path,
        packets=1,
        first=now,
        last=now,
        source_pod=_observed(of_source, pods, ()) if of_source else None,
    )


def _observed(
    pod: NamedPod, pods: NamedPods, named_ports: tuple[tuple[str, str, int], ...]
) -> ObservedPod:
    return ObservedPod(
        namespace=pod.namespace,
        name=pod.name,
        labels=pod.labels,
        namespace_labels=pods.namespace_labels.get(pod.namespace, {}),
        host_network=pod.host_network,
        named_ports=named_ports,
    )

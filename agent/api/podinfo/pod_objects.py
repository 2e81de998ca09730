"""One pod as the kubelet's pods API tells it: v1.Pod in protobuf, with what podgate holds of it.

Without probes, hooks and environment: headers may be secrets, and who asks for states needs none.
"""

import contextlib
import datetime
from typing import Any

from agent.api.podinfo import merge
from agent.api.podinfo.merge import Known
from agent.api.podinfo.publisher import Entry
from agent.kube.objects import ApiContainer, ApiPod, ContainerStatus
from agent.kubelet import kubelet_pb2


class PodObjects:
    """A `Teller` without memory."""

    def tell(self, known: Known, now: datetime.datetime) -> Entry:
        """The pod as an element of ListPodsResponse."""
        uid, namespace, name = merge.identity(known)
        pod = kubelet_pb2.Pod()
        pod.metadata.uid = merge.text(uid)
        pod.metadata.namespace = merge.text(namespace)
        pod.metadata.name = merge.text(name)
        if found := known.newer:
            _fill(pod, found)
        elif known.pod:
            pod.spec.hostNetwork = known.pod.host_network
            for key, value in known.pod.labels.items():
                pod.metadata.labels[merge.text(key)] = merge.text(value)
        for said in merge.believed(known):
            one = pod.status.conditions.add(
                type=merge.text(said.type),
                status=merge.text(said.status),
                reason=merge.text(said.reason),
                message=merge.text(said.message),
            )
            _set_time(one, "lastProbeTime", said.probed)
            _set_time(one, "lastTransitionTime", said.since)
        content = kubelet_pb2.ListPodsResponse(pods=[pod.SerializeToString()])
        return Entry((namespace, name, uid), content.SerializeToString(), merge.uids(known))


def header(instance_id: int, rev: int) -> bytes:
    """The kubelet's responses have no revision."""
    return b""


def pod_of(entry: Entry) -> bytes:
    """The v1.Pod."""
    return bytes(kubelet_pb2.ListPodsResponse.FromString(entry.content).pods[0])


def _fill(pod: kubelet_pb2.Pod, found: ApiPod) -> None:
    metadata, spec, status = found.metadata, found.spec, found.status
    pod.metadata.resourceVersion = metadata.resource_version
    pod.metadata.generation = metadata.generation
    pod.metadata.labels.update(metadata.labels)
    pod.metadata.annotations.update(metadata.annotations)
    _set_time(pod.metadata, "deletionTimestamp", metadata.deletion_timestamp)
    pod.spec.nodeName = spec.node_name
    pod.spec.hostNetwork = spec.host_network
    _add_containers(pod.spec.initContainers, spec.init_containers)
    _add_containers(pod.spec.containers, spec.containers)
    for gate in spec.readiness_gates:
        pod.spec.readinessGates.add(conditionType=gate.condition_type)
    pod.status.phase = status.phase
    for address in status.pod_ips:
        pod.status.podIPs.add(ip=address.ip)
    _add_statuses(pod.status.initContainerStatuses, status.init_container_statuses)
    _add_statuses(pod.status.containerStatuses, status.container_statuses)


def _add_containers(to: Any, containers: tuple[ApiContainer, ...]) -> None:
    for container in containers:
        # Kept as they came, so of any kind.
        if isinstance(container.name, str):
            one = to.add(name=container.name)
            if isinstance(container.restart_policy, str):
                one.restartPolicy = container.restart_policy


def _add_statuses(to: Any, statuses: tuple[ContainerStatus, ...]) -> None:
    for status in statuses:
        one = to.add(
            name=status.name,
            containerID=status.container_id,
            ready=status.ready,
            restartCount=status.restart_count,
        )
        if status.started is not None:
            one.started = status.started
        if status.state.running is not None:
            one.state.running.SetInParent()
            _set_time(one.state.running, "startedAt", status.state.running.started_at)


def _set_time(message: Any, name: str, text: str | None) -> None:
    """A text that is no time is left out."""
    with contextlib.suppress(ValueError):
        if text:
            moment = datetime.datetime.fromisoformat(text)
            getattr(message, name).seconds = int(moment.timestamp())

"""Encodes one pod for the kubelet's pods API: v1.Pod in protobuf, with the fields that podgate has.

Without probes, hooks and environment: they may contain secrets, and clients of a pod's state need
none of them.
"""

import contextlib
import datetime
from typing import Any

from agent.api.podinfo import merge
from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.publisher import EncodedPod
from agent.kube.objects import ApiContainer, ApiPod, ContainerStatus
from agent.kube.pod_reports import PodReports
from agent.kubelet import kubelet_pb2


class PodsEncoder:
    """An `Encoder` without state."""

    def encode(self, record: PodRecord, now: datetime.datetime) -> EncodedPod:
        """The pod as an element of ListPodsResponse."""
        uid, namespace, name = record.identity
        pod = kubelet_pb2.Pod()
        pod.metadata.uid = merge.utf8_safe(uid)
        pod.metadata.namespace = merge.utf8_safe(namespace)
        pod.metadata.name = merge.utf8_safe(name)
        if found := record.newer:
            _fill(pod, found, record.reports)
        elif record.pod:
            pod.spec.hostNetwork = record.pod.host_network
            for key, value in record.pod.labels.items():
                pod.metadata.labels[merge.utf8_safe(key)] = merge.utf8_safe(value)
        for reported in merge.effective_conditions(record):
            condition = pod.status.conditions.add(
                type=merge.utf8_safe(reported.type),
                status=merge.utf8_safe(reported.status),
                reason=merge.utf8_safe(reported.reason),
                message=merge.utf8_safe(reported.message),
            )
            _set_time(condition, "lastProbeTime", reported.last_probe_time)
            _set_time(condition, "lastTransitionTime", reported.last_transition_time)
        content = kubelet_pb2.ListPodsResponse(pods=[pod.SerializeToString()])
        return EncodedPod((namespace, name, uid), content.SerializeToString(), record.uids)


def header(instance_id: int, rev: int) -> bytes:
    """The kubelet's responses have no revision."""
    return b""


def pod_of(encoded: EncodedPod) -> bytes:
    """The v1.Pod."""
    return bytes(kubelet_pb2.ListPodsResponse.FromString(encoded.content).pods[0])


def _fill(pod: kubelet_pb2.Pod, found: ApiPod, reports: PodReports) -> None:
    metadata, spec = found.metadata, found.spec
    status = (reports.newest_status or found).status
    pod.metadata.resourceVersion = metadata.resource_version
    pod.metadata.generation = metadata.generation
    pod.metadata.labels.update(metadata.labels)
    pod.metadata.annotations.update(metadata.annotations)
    _set_time(pod.metadata, "deletionTimestamp", reports.deletion_timestamp)
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
        # Decoded without a check, so of any type.
        if isinstance(container.name, str):
            added = to.add(name=container.name)
            if isinstance(container.restart_policy, str):
                added.restartPolicy = container.restart_policy


def _add_statuses(to: Any, statuses: tuple[ContainerStatus, ...]) -> None:
    for status in statuses:
        added = to.add(
            name=status.name,
            containerID=status.container_id,
            ready=status.ready,
            restartCount=status.restart_count,
        )
        if status.started is not None:
            added.started = status.started
        if status.state.running is not None:
            added.state.running.SetInParent()
            _set_time(added.state.running, "startedAt", status.state.running.started_at)


def _set_time(message: Any, name: str, text: str | None) -> None:
    """Set a time; leave the field unset if the text is none."""
    with contextlib.suppress(ValueError):
        if text:
            moment = datetime.datetime.fromisoformat(text)
            getattr(message, name).seconds = int(moment.timestamp())

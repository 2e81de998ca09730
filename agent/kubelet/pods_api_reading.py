"""Decodes the kubelet's v1.Pod (protobuf) to the same object as the API server's JSON.

Fields that JSON omits (zeros, empty strings) are omitted here too, so that defaults and errors are
the same: Kubernetes' marshaller writes every field that is not a pointer, also if it is zero.
"""

import datetime
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from agent.errors import PodgateError
from agent.kube.objects import ApiPod
from agent.kubelet import kubelet_pb2

_Json = dict[str, Any]


class PodDecodeError(PodgateError):
    """The bytes are not a valid pod; the message is the reason."""


def read(content: bytes) -> ApiPod:
    """The pod. Raises `PodDecodeError`."""
    try:
        pod = kubelet_pb2.Pod.FromString(content)
        return msgspec.convert(_pod(pod), ApiPod)
    # The last three: a time out of range.
    except (DecodeError, ValueError, OverflowError, OSError) as error:
        raise PodDecodeError(str(error)) from error


def _pod(pod: Any) -> _Json:
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    return {
        "metadata": _without_zeros(
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            resourceVersion=metadata.resourceVersion,
            generation=metadata.generation,
            creationTimestamp=_time(metadata, "creationTimestamp"),
            labels=dict(metadata.labels),
            annotations=dict(metadata.annotations),
            deletionTimestamp=_time(metadata, "deletionTimestamp"),
        )
        # A pod without a name is invalid, and must be rejected as such.
        | {"name": metadata.name or None},
        "spec": _without_zeros(
            nodeName=spec.nodeName,
            hostNetwork=spec.hostNetwork,
            serviceAccountName=spec.serviceAccountName,
            initContainers=[_container(one) for one in spec.initContainers],
            containers=[_container(one) for one in spec.containers],
            readinessGates=[{"conditionType": one.conditionType} for one in spec.readinessGates],
        ),
        "status": _without_zeros(
            phase=status.phase,
            podIPs=[{"ip": one.ip} for one in status.podIPs],
            conditions=[condition(one) for one in status.conditions],
            initContainerStatuses=[_status(one) for one in status.initContainerStatuses],
            containerStatuses=[_status(one) for one in status.containerStatuses],
        ),
    }


def _container(container: Any) -> _Json:
    return _without_zeros(
        name=container.name,
        ports=[
            _without_zeros(
                name=port.name,
                hostPort=port.hostPort,
                containerPort=port.containerPort,
                protocol=port.protocol,
            )
            for port in container.ports
        ],
        startupProbe=_probe(container, "startupProbe"),
        readinessProbe=_probe(container, "readinessProbe"),
        livenessProbe=_probe(container, "livenessProbe"),
        lifecycle=_lifecycle(container.lifecycle),
        restartPolicy=container.restartPolicy,
    )


def _probe(container: Any, name: str) -> _Json | None:
    if not container.HasField(name):
        return None
    probe = getattr(container, name)
    found = _without_zeros(
        initialDelaySeconds=probe.initialDelaySeconds,
        timeoutSeconds=probe.timeoutSeconds,
        periodSeconds=probe.periodSeconds,
        successThreshold=probe.successThreshold,
        failureThreshold=probe.failureThreshold,
    )
    if probe.HasField("terminationGracePeriodSeconds"):
        found["terminationGracePeriodSeconds"] = probe.terminationGracePeriodSeconds
    return found | _handlers(probe.handler)


def _lifecycle(lifecycle: Any) -> _Json:
    hooks = {name: _handlers(getattr(lifecycle, name)) for name in ("postStart", "preStop")}
    return {name: handlers for name, handlers in hooks.items() if handlers}


def _handlers(message: Any) -> _Json:
    """All that are given, of whatever kind kubelet.proto has."""
    return {field.name: _fields(handler) for field, handler in message.ListFields()}


def _fields(message: Any) -> Any:
    """A message with all that is given in it, as the API's JSON."""
    if isinstance(message, kubelet_pb2.IntOrString):
        return str(message.strVal) if message.type else int(message.intVal)
    if isinstance(message, kubelet_pb2.HTTPHeader):  # the API's has both without omitempty
        return {"name": message.name, "value": message.value}
    return {
        field.name: [_value(one) for one in value] if field.is_repeated else _value(value)
        for field, value in message.ListFields()
    }


def _value(value: Any) -> Any:
    return _fields(value) if isinstance(value, Message) else value


def condition(condition: Any) -> _Json:
    """A v1.PodCondition as the API's JSON."""
    return _without_zeros(
        type=condition.type,
        status=condition.status,
        reason=condition.reason,
        message=condition.message,
        lastProbeTime=_time(condition, "lastProbeTime"),
        lastTransitionTime=_time(condition, "lastTransitionTime"),
        observedGeneration=condition.observedGeneration,
    )


def _status(status: Any) -> _Json:
    found = _without_zeros(
        name=status.name,
        containerID=status.containerID,
        ready=status.ready,
        restartCount=status.restartCount,
    )
    if status.HasField("started"):
        found["started"] = status.started
    if status.state.HasField("running"):
        running = status.state.running
        found["state"] = {"running": _without_zeros(startedAt=_time(running, "startedAt"))}
    return found


def _time(message: Any, name: str) -> str | None:
    if not message.HasField(name):
        return None
    seconds = getattr(message, name).seconds
    # Go's zero time.Time.
    if seconds <= 0:
        return None
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _without_zeros(**fields: Any) -> _Json:
    return {name: value for name, value in fields.items() if value}

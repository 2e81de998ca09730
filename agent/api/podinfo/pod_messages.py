"""PodInfo's messages, encoded."""

import functools

from google.protobuf.timestamp_pb2 import Timestamp

from agent.api.podinfo import merge
from agent.api.podinfo.observed_pods import ObservedPod
from agent.client.v1alpha1 import podinfo_pb2

_STATUSES = {
    "True": podinfo_pb2.CONDITION_STATUS_TRUE,
    "False": podinfo_pb2.CONDITION_STATUS_FALSE,
    "Unknown": podinfo_pb2.CONDITION_STATUS_UNKNOWN,
}


def encode(pod: ObservedPod) -> bytes:
    """A response that has nothing but this pod: an element of ListPodConditionsResponse."""
    content = podinfo_pb2.ListPodConditionsResponse(pods=[_message(pod)])
    return bytes(content.SerializeToString())


def _message(pod: ObservedPod) -> podinfo_pb2.PodConditions:
    uid, namespace, name = pod.identity
    message = podinfo_pb2.PodConditions(
        pod_uid=merge.utf8_safe(uid),
        pod_namespace=merge.utf8_safe(namespace),
        pod_name=merge.utf8_safe(name),
        static=pod.is_static,
        mirror_pod_uid=merge.utf8_safe(pod.mirror_uid),
    )
    _set_time(message.deletion_timestamp, pod.deletion_timestamp)
    for reported, observed in pod.conditions:
        condition = message.conditions.add(
            type=merge.utf8_safe(reported.type),
            status=_STATUSES.get(reported.status, podinfo_pb2.CONDITION_STATUS_UNSPECIFIED),
            reason=merge.utf8_safe(reported.reason),
            message=merge.utf8_safe(reported.message),
            source=reported.source,
        )
        _set_time(condition.last_probe_time, reported.last_probe_time)
        _set_time(condition.last_transition_time, reported.last_transition_time)
        if observed:
            condition.observe_time.FromDatetime(observed)
    return message


def header(instance_id: int, rev: int) -> bytes:
    """The first fields of each of the three responses, which have the same numbers."""
    response = podinfo_pb2.ListPodConditionsResponse(instance_id=instance_id, rev=rev)
    return bytes(response.SerializeToString())


def _set_time(field: Timestamp, text: str) -> None:
    """Set a time; leave the field unset if the text is none."""
    if text and (found := _timestamp(text)):
        field.CopyFrom(found)


@functools.lru_cache(maxsize=4096)
def _timestamp(text: str) -> Timestamp | None:
    """None for a text that is no time. Reading one takes longer than encoding its condition, which
    is encoded again with each change of the pod."""
    found = Timestamp()
    try:
        found.FromJsonString(text)
    except ValueError:
        return None
    return found

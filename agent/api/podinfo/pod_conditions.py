"""Encodes one pod and its conditions for PodInfo."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from agent.api.podinfo import merge
from agent.api.podinfo.merge import PodRecord, ReportedCondition
from agent.client.v1alpha1 import podinfo_pb2

_STATUSES = {
    "True": podinfo_pb2.CONDITION_STATUS_TRUE,
    "False": podinfo_pb2.CONDITION_STATUS_FALSE,
    "Unknown": podinfo_pb2.CONDITION_STATUS_UNKNOWN,
}
_FirstSeen = Mapping[ReportedCondition, datetime.datetime | None]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPod:
    """One pod, encoded. order: sort key in the list; content: the bytes of a response that has
    nothing but this pod; uids: all uids by which clients may request it."""

    order: tuple[str, str, str]
    content: bytes
    uids: tuple[str, ...]


class ConditionsEncoder:
    """Encodes one pod, and remembers when each condition was first seen as it is now."""

    def __init__(self) -> None:
        self._first_seen: _FirstSeen = {}

    def encode(self, record: PodRecord, now: datetime.datetime) -> EncodedPod:
        """The pod with its conditions, as an element of ListPodConditionsResponse."""
        first_seen: dict[ReportedCondition, datetime.datetime | None] = {}
        for reported in merge.reported_conditions(record):
            is_received = merge.is_received(record, reported.source)
            first_seen[reported] = self._first_seen.get(reported) or (now if is_received else None)
        self._first_seen = first_seen
        message = _message(record, first_seen)
        content = podinfo_pb2.ListPodConditionsResponse(pods=[message])
        order = (message.pod_namespace, message.pod_name, message.pod_uid)
        return EncodedPod(order, content.SerializeToString(), record.uids)


def _message(record: PodRecord, first_seen: _FirstSeen) -> podinfo_pb2.PodConditions:
    uid, namespace, name = record.identity
    message = podinfo_pb2.PodConditions(
        pod_uid=merge.utf8_safe(uid),
        pod_namespace=merge.utf8_safe(namespace),
        pod_name=merge.utf8_safe(name),
        static=record.is_static,
        mirror_pod_uid=merge.utf8_safe(record.mirror_uid),
    )
    _set_time(message.deletion_timestamp, record.reports.deletion_timestamp)
    for reported in merge.effective_conditions(record):
        condition = message.conditions.add(
            type=merge.utf8_safe(reported.type),
            status=_STATUSES.get(reported.status, podinfo_pb2.CONDITION_STATUS_UNSPECIFIED),
            reason=merge.utf8_safe(reported.reason),
            message=merge.utf8_safe(reported.message),
            source=reported.source,
        )
        _set_time(condition.last_probe_time, reported.last_probe_time)
        _set_time(condition.last_transition_time, reported.last_transition_time)
        if observed := first_seen[reported]:
            condition.observe_time.FromDatetime(observed)
    return message


def header(instance_id: int, rev: int) -> bytes:
    """The first fields of each of the three responses, which have the same numbers."""
    response = podinfo_pb2.ListPodConditionsResponse(instance_id=instance_id, rev=rev)
    return bytes(response.SerializeToString())


def _set_time(field: Timestamp, text: str | None) -> None:
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

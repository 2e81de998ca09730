"""One pod and its conditions as PodInfo tells them."""

import contextlib
import datetime
from collections.abc import Mapping
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from agent.api.podinfo import merge
from agent.api.podinfo.merge import Known, Said
from agent.api.podinfo.publisher import Entry
from agent.client import podinfo_pb2

_STATUSES: Final = {
    "True": podinfo_pb2.CONDITION_STATUS_TRUE,
    "False": podinfo_pb2.CONDITION_STATUS_FALSE,
    "Unknown": podinfo_pb2.CONDITION_STATUS_UNKNOWN,
}


class Sightings:
    """What is told of one pod: since when each condition has been known as it is now."""

    def __init__(self) -> None:
        self._first: dict[Said, datetime.datetime | None] = {}

    def tell(self, known: Known, now: datetime.datetime) -> Entry:
        """The pod with its conditions, as an element of ListPodConditionsResponse."""
        first: dict[Said, datetime.datetime | None] = {}
        for said in merge.all_said(known):
            is_heard = said.source != merge.API or known.is_confirmed
            first[said] = self._first.get(said) or (now if is_heard else None)
        self._first = first
        told = _message(known, first)
        content = podinfo_pb2.ListPodConditionsResponse(pods=[told])
        order = (told.pod_namespace, told.pod_name, told.pod_uid)
        return Entry(order, content.SerializeToString(), merge.uids(known))


def _message(
    known: Known, first: Mapping[Said, datetime.datetime | None]
) -> podinfo_pb2.PodConditions:
    uid, namespace, name = merge.identity(known)
    made = podinfo_pb2.PodConditions(
        pod_uid=merge.text(uid),
        pod_namespace=merge.text(namespace),
        pod_name=merge.text(name),
        static=merge.is_static(known),
        mirror_pod_uid=merge.text(merge.mirror_uid(known)),
    )
    if newer := known.newer:
        _set_time(made.deletion_timestamp, newer.metadata.deletion_timestamp)
    for said in merge.believed(known):
        one = made.conditions.add(
            type=merge.text(said.type),
            status=_STATUSES.get(said.status, podinfo_pb2.CONDITION_STATUS_UNSPECIFIED),
            reason=merge.text(said.reason),
            message=merge.text(said.message),
            source=said.source,
        )
        _set_time(one.last_probe_time, said.probed)
        _set_time(one.last_transition_time, said.since)
        if observed := first[said]:
            one.observe_time.FromDatetime(observed)
    return made


def header(instance_id: int, rev: int) -> bytes:
    """Of each of the three responses: their fields have the same numbers."""
    made = podinfo_pb2.ListPodConditionsResponse(instance_id=instance_id, rev=rev)
    return bytes(made.SerializeToString())


def _set_time(field: Timestamp, text: str | None) -> None:
    """A text that is no time is left out."""
    with contextlib.suppress(ValueError):
        if text:
            found = Timestamp()
            found.FromJsonString(text)
            field.CopyFrom(found)

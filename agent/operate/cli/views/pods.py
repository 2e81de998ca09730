"""Output of `podgate pods`."""

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

from google.protobuf import json_format

from agent.client.podinfo import PodInfoState
from agent.client.v1alpha1 import podinfo_pb2
from agent.listing import full_name
from agent.operate.cli.output import Column, Signal

_STATUSES = {
    podinfo_pb2.CONDITION_STATUS_TRUE: "True",
    podinfo_pb2.CONDITION_STATUS_FALSE: "False",
    podinfo_pb2.CONDITION_STATUS_UNKNOWN: "Unknown",
}
_SOURCES = {
    podinfo_pb2.CONDITION_SOURCE_PODGATE: "podgate",
    podinfo_pb2.CONDITION_SOURCE_KUBELET: "kubelet",
    podinfo_pb2.CONDITION_SOURCE_API: "api",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ConditionRow:
    """One condition of one pod. type: empty for a pod without conditions; since: None if it is from
    before the agent's start."""

    pod: str
    type: str = ""
    status: str = ""
    reason: str = ""
    source: str = ""
    since: datetime.datetime | None = None


CONDITIONS: tuple[Column[ConditionRow], ...] = (
    Column("POD", lambda row: row.pod),
    Column("CONDITION", lambda row: row.type or "none"),
    Column(
        "STATUS",
        lambda row: row.status,
        signal=lambda row: Signal.CAUTION if row.status not in ("", "True") else None,
    ),
    Column("REASON", lambda row: row.reason, is_below=True),
    Column("SOURCE", lambda row: row.source),
    Column("SINCE", lambda row: row.since),
)


def rows(state: PodInfoState) -> list[ConditionRow]:
    """One for each condition."""
    return [row for pod in state.pods for row in _rows(pod)]


def _rows(pod: podinfo_pb2.PodConditions) -> Iterable[ConditionRow]:
    name = full_name(pod.pod_namespace, pod.pod_name)
    if pod.static:
        name += " (static)"
    if pod.HasField("deletion_timestamp"):
        name += " (terminating)"
    if not pod.conditions:
        yield ConditionRow(name)
    for condition in pod.conditions:
        has_time = condition.HasField("observe_time")
        yield ConditionRow(
            pod=name,
            type=condition.type,
            status=_STATUSES.get(condition.status, "?"),
            reason=condition.reason,
            source=_SOURCES.get(condition.source, "?"),
            since=condition.observe_time.ToDatetime(datetime.UTC) if has_time else None,
        )


def document(state: PodInfoState) -> dict[str, Any]:
    """In protobuf's JSON form."""
    response = podinfo_pb2.ListPodConditionsResponse(
        instance_id=state.instance_id, rev=state.rev, pods=state.pods
    )
    found: dict[str, Any] = json_format.MessageToDict(
        response, always_print_fields_with_no_presence=True
    )
    return found

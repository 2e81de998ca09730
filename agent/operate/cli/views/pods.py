"""Output of `podgate pods`."""

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

from google.protobuf import json_format

from agent.api.conditions.validation import OWNER_GONE, SANDBOX_CHANGED
from agent.client.podinfo import PodInfoState
from agent.client.v1alpha1 import podinfo_pb2
from agent.listing import full_name
from agent.operate.cli.output import Column, Signal
from agent.pods.conditions import TRUE

_STATUSES = {
    podinfo_pb2.CONDITION_STATUS_TRUE: "True",
    podinfo_pb2.CONDITION_STATUS_FALSE: "False",
    podinfo_pb2.CONDITION_STATUS_UNKNOWN: "Unknown",
}
_OWNER = "owner"
_SOURCES = {
    podinfo_pb2.CONDITION_SOURCE_PODGATE: "podgate",
    podinfo_pb2.CONDITION_SOURCE_KUBELET: "kubelet",
    podinfo_pb2.CONDITION_SOURCE_API: "api",
    podinfo_pb2.CONDITION_SOURCE_OWNER: _OWNER,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ConditionRow:
    """One condition of one pod. type: empty for a pod without conditions; since: None if it is from
    before the agent's start."""

    pod: str
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    source: str = ""
    since: datetime.datetime | None = None


def _stale_signal(row: ConditionRow) -> Signal | None:
    """Of an owner's condition that is not current: the owner is gone, or has not reported it since
    the pod has another sandbox."""
    if row.source != _OWNER or row.reason not in (OWNER_GONE, SANDBOX_CHANGED):
        return None
    is_gone = row.reason == OWNER_GONE and row.status != TRUE
    return Signal.DANGER if is_gone else Signal.CAUTION


CONDITIONS: tuple[Column[ConditionRow], ...] = (
    Column("POD", lambda row: row.pod),
    Column("CONDITION", lambda row: row.type or "none"),
    Column(
        "STATUS",
        lambda row: row.status,
        signal=lambda row: Signal.CAUTION if row.status not in ("", "True") else None,
    ),
    Column("REASON", lambda row: row.reason, signal=_stale_signal, is_below=True),
    Column("SOURCE", lambda row: row.source),
    Column("SINCE", lambda row: row.since),
    Column("MESSAGE", lambda row: row.message, is_wide=True, is_below=True),
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
            message=condition.message,
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

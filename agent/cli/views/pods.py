"""Output of `podgate pods`."""

import datetime
from typing import Any

import rich.markup
from google.protobuf import json_format

from agent.cli.views import tables
from agent.client import podinfo_pb2
from agent.client.podinfo import PodInfoState

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


def show(state: PodInfoState) -> None:
    """Print a table, one line per condition."""
    now = datetime.datetime.now(datetime.UTC)
    table = tables.table("pod", "condition", "status", "reason", "source", "known for")
    for pod in state.pods:
        name = tables.full_name(pod.pod_namespace, pod.pod_name)
        if pod.static:
            name += " (static)"
        if pod.HasField("deletion_timestamp"):
            name += " (terminating)"
        rows = [
            (
                condition.type,
                _STATUSES.get(condition.status, "?"),
                condition.reason,
                _SOURCES.get(condition.source, "?"),
                _age(condition, now),
            )
            for condition in pod.conditions
        ]
        for row in rows or [("none", "", "", "", "")]:
            table.add_row(*(rich.markup.escape(cell) for cell in (name, *row)))
            name = ""
    tables.console().print(table)


def document(state: PodInfoState) -> dict[str, Any]:
    """In protobuf's JSON form."""
    response = podinfo_pb2.ListPodConditionsResponse(
        instance_id=state.instance_id, rev=state.rev, pods=state.pods
    )
    found: dict[str, Any] = json_format.MessageToDict(
        response, always_print_fields_with_no_presence=True
    )
    return found


def _age(condition: podinfo_pb2.PodCondition, now: datetime.datetime) -> str:
    if not condition.HasField("observe_time"):
        return "before start"
    seconds = (now - condition.observe_time.ToDatetime(datetime.UTC)).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

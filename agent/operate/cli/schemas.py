"""JSON schemas of what commands print with -o json and yaml, for docs/reference/schemas/."""

import json
import re
from typing import Any

import msgspec
from google.protobuf import descriptor

from agent.admin.report import (
    AgentReport,
    DropEventStatus,
    Drops,
    RulesReport,
    SuppressedEvents,
)
from agent.client.v1alpha1 import podinfo_pb2
from agent.flows.records import Record
from agent.operate.cli.commands.probe import ProbeReport
from agent.operate.cli.views.probes import PodProbes
from agent.operate.cli.views.suggestions import SuggestOutput
from agent.operate.doctor.results import DoctorReport
from agent.operate.explain.model import Explanation, PodExplanation
from agent.operate.pinned.maps import MapContent, MapStatus
from agent.operate.pinned.programs import ProgramsReport
from agent.operate.pinned.report import PinnedStatus
from agent.services.client.v1alpha1 import endpoints_pb2

DOCUMENTS: dict[str, tuple[Any, str]] = {
    "doctor": (DoctorReport, "podgate doctor"),
    "drops": (Drops, "podgate drops"),
    "drops-follow": (DropEventStatus, "podgate drops --follow: one document per event"),
    "drops-follow-suppressed": (
        *(SuppressedEvents, "podgate drops --follow: one document whenever events were suppressed"),
    ),
    "explain": (Explanation, "podgate explain"),
    "explain-pod": (PodExplanation, "podgate explain pod"),
    "flows": (Record, "what podgate run --flows-file writes: one document each line"),
    "map": (MapContent, "podgate maps NAME"),
    "maps": (list[MapStatus], "podgate maps"),
    "pods": (podinfo_pb2.ListPodConditionsResponse, "podgate pods: one document per state"),
    "probe": (ProbeReport, "podgate probe"),
    "probes": (list[PodProbes], "podgate probes"),
    "programs": (ProgramsReport, "podgate programs"),
    "rules": (RulesReport, "podgate rules"),
    "services": (endpoints_pb2.ServiceEndpoints, "podgate services: one document per state"),
    "status": (AgentReport, "podgate status"),
    "status-without-agent": (PinnedStatus, "podgate status, without an agent"),
    "suggest": (SuggestOutput, "podgate suggest -o json"),
}
"""By file name: the type, and what prints it."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# protobuf's JSON form: 64-bit numbers are texts, enums are names.
_PROTOBUF_TYPES: dict[int, dict[str, Any]] = {
    descriptor.FieldDescriptor.TYPE_UINT64: {"type": "string", "pattern": "^[0-9]+$"},
    descriptor.FieldDescriptor.TYPE_UINT32: {"type": "integer", "minimum": 0},
    descriptor.FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    descriptor.FieldDescriptor.TYPE_STRING: {"type": "string"},
}
_TIME = {"type": "string", "format": "date-time"}


def schemas() -> dict[str, str]:
    """Content by file name."""
    made = {}
    for name, (kind, title) in DOCUMENTS.items():
        found = {"$schema": _DIALECT, "title": title, **_described(_schema(name, kind))}
        made[f"{name}.schema.json"] = json.dumps(found, indent=2) + "\n"
    return made


def _schema(name: str, kind: Any) -> dict[str, Any]:
    if name == "services":
        return _services()
    if isinstance(found := getattr(kind, "DESCRIPTOR", None), descriptor.Descriptor):
        return _of_message(found)
    return msgspec.json.schema(kind)


def _described(schema: Any) -> Any:
    """With descriptions in one line, whatever Python makes of docstrings, and names as in JSON."""
    if isinstance(schema, list):
        return [_described(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _in_json(each) if key == "description" and isinstance(each, str) else _described(each)
        for key, each in schema.items()
    }


def _in_json(description: str) -> str:
    text = " ".join(description.split())
    return re.sub(r"(?<=[a-z])_([a-z])", lambda found: found[1].upper(), text)


def _services() -> dict[str, Any]:
    """As `agent.operate.cli.views.services.document`: the stream's header, and all services."""
    number = _PROTOBUF_TYPES[descriptor.FieldDescriptor.TYPE_UINT64]
    services = _of_message(endpoints_pb2.ServiceEndpoints.DESCRIPTOR)
    return {
        "type": "object",
        "properties": {
            "instanceId": number,
            "rev": number,
            "savedAt": _TIME,
            "services": {"type": "array", "items": services},
        },
        "required": ["services"],
    }


def _of_message(found: descriptor.Descriptor) -> dict[str, Any]:
    properties = {field.json_name: _of_field(field) for field in found.fields}
    return {"type": "object", "properties": properties}


def _of_field(field: descriptor.FieldDescriptor) -> dict[str, Any]:
    made: dict[str, Any]
    if field.message_type and field.message_type.full_name == "google.protobuf.Timestamp":
        made = _TIME
    elif field.message_type and field.message_type.GetOptions().map_entry:
        values = field.message_type.fields_by_name["value"]
        return {"type": "object", "additionalProperties": _of_field(values)}
    elif field.message_type:
        made = _of_message(field.message_type)
    elif field.enum_type:
        made = {"enum": [value.name for value in field.enum_type.values]}
    else:
        made = _PROTOBUF_TYPES[field.type]
    return {"type": "array", "items": made} if field.is_repeated else made

"""Records as log records of OTLP, with OpenTelemetry's names of attributes where it has some."""

import datetime
from collections.abc import Mapping

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2

from agent.drops.source_processes import protocol_word
from agent.flows.records import (
    AdmissionRecord,
    DropRecord,
    FlowRecord,
    LostRecord,
    Record,
    SourceRecord,
    StartRecord,
)

_Attributes = Mapping[str, str | int | bool]


def resource(node: str, version: str) -> resource_pb2.Resource:
    """What all records have in common; node: empty without a cluster."""
    return resource_pb2.Resource(
        attributes=_key_values(
            {"service.name": "podgate", "service.version": version, "k8s.node.name": node}
        )
    )


def scope(version: str) -> common_pb2.InstrumentationScope:
    return common_pb2.InstrumentationScope(name="podgate.flows", version=version)


def log_record(record: Record) -> logs_pb2.LogRecord:
    """Its time is that of the last packet. The body is for people; all of it is in attributes."""
    at, is_warning, body, attributes = _parts(record)
    severity = logs_pb2.SEVERITY_NUMBER_WARN if is_warning else logs_pb2.SEVERITY_NUMBER_INFO
    return logs_pb2.LogRecord(
        time_unix_nano=_nanoseconds(at),
        observed_time_unix_nano=_nanoseconds(record.time),
        severity_number=severity,
        severity_text="WARN" if is_warning else "INFO",
        event_name=f"podgate.{record.__struct_config__.tag}",
        body=common_pb2.AnyValue(string_value=body),
        attributes=_key_values(attributes),
    )


def _parts(record: Record) -> tuple[datetime.datetime, bool, str, _Attributes]:
    """Time, whether it is a warning, body and attributes."""
    match record:
        case FlowRecord():
            return (
                record.last,
                record.verdict == "DROPPED",
                _flow_body(record),
                _flow_attributes(record),
            )
        case DropRecord():
            return (
                record.time,
                record.verdict == "DROPPED",
                _drop_body(record),
                _drop_attributes(record),
            )
        case AdmissionRecord():
            body = f"{record.policy} admitted {record.flows} flows of {record.source}"
            return record.time, False, body, _admission_attributes(record)
        case LostRecord():
            body = f"Lost in {record.place}: {record.records} records, {record.packets} packets"
            return record.time, True, body, _lost_attributes(record)
        case StartRecord():
            return record.time, False, f"podgate {record.version} records flows", {}


def _flow_body(record: FlowRecord) -> str:
    port = "many ports" if record.has_many_ports else str(record.port or "")
    target = f"{_pod_text(record)} {protocol_word(record.protocol)} {port}".rstrip()
    return f"{record.verdict} {record.packets} packets of {_text(record.source)} to {target}"


def _drop_body(record: DropRecord) -> str:
    target = f"{_pod_text(record)} {protocol_word(record.protocol)}"
    port = f" {record.destination_port}" if record.destination_port else ""
    return f"{record.verdict} ({record.reason}) {_text(record.source)} to {target}{port}"


def _text(source: SourceRecord) -> str:
    where = f"pod {source.pod}" if source.pod else source.cgroup
    return f"{source.process} in {where}" if source.process else where


def _pod_text(record: FlowRecord | DropRecord) -> str:
    to = record.destination
    return f"{to.namespace}/{to.pod}" if to.pod else "a pod that ended"


def _flow_attributes(record: FlowRecord) -> _Attributes:
    return {
        **_common(record),
        "destination.port": record.port,
        "podgate.has_many_ports": record.has_many_ports,
        "podgate.mode": record.mode,
        "podgate.packets": record.packets,
        "podgate.first": record.first.isoformat(),
    }


def _drop_attributes(record: DropRecord) -> _Attributes:
    address = record.destination_address or record.source_address
    return {
        **_common(record),
        "source.address": record.source_address,
        "source.port": record.source_port,
        "destination.address": record.destination_address,
        "destination.port": record.destination_port,
        "network.type": "" if not address else "ipv6" if ":" in address else "ipv4",
        "process.pid": record.pid,
        "podgate.reason": record.reason,
    }


def _admission_attributes(record: AdmissionRecord) -> _Attributes:
    return {
        "podgate.verdict": record.verdict,
        "podgate.policy": record.policy,
        "podgate.rule.source": record.source,
        "podgate.rule.protocol": record.protocol,
        "podgate.rule.ports": record.ports,
        "podgate.flows": record.flows,
    }


def _lost_attributes(record: LostRecord) -> _Attributes:
    return {
        "podgate.lost.place": record.place,
        "podgate.lost.records": record.records,
        "podgate.lost.packets": record.packets,
        "podgate.lost.since": record.since.isoformat(),
    }


def _common(record: FlowRecord | DropRecord) -> _Attributes:
    """The pod is the one that is called: of it these records are."""
    namespace, _, name = record.source.pod.partition("/")
    return {
        "k8s.namespace.name": record.destination.namespace,
        "k8s.pod.name": record.destination.pod,
        "network.transport": protocol_word(record.protocol),
        "process.linux.cgroup": record.source.cgroup,
        "process.executable.name": record.source.process,
        "podgate.source.namespace.name": namespace,
        "podgate.source.pod.name": name,
        "podgate.verdict": record.verdict,
    }


def _key_values(attributes: _Attributes) -> list[common_pb2.KeyValue]:
    """Without those that are empty; numbers that count remain, also 0."""
    return [
        common_pb2.KeyValue(key=key, value=_value(value))
        for key, value in attributes.items()
        if value != "" and not (value == 0 and key.endswith((".port", ".pid")))
    ]


def _value(value: str | int | bool) -> common_pb2.AnyValue:
    if isinstance(value, bool):
        return common_pb2.AnyValue(bool_value=value)
    if isinstance(value, int):
        return common_pb2.AnyValue(int_value=value)
    return common_pb2.AnyValue(string_value=value)


def _nanoseconds(at: datetime.datetime) -> int:
    """Exact to the microsecond, which a float is not."""
    since = at - datetime.datetime.fromtimestamp(0, datetime.UTC)
    return (since // datetime.timedelta(microseconds=1)) * 1000

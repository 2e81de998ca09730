"""Records as log records of OTLP: time, severity, text and attributes of each kind."""

import datetime
from typing import Any

import pytest
from opentelemetry.proto.logs.v1 import logs_pb2

from agent.flows import otlp_records
from agent.flows.records import (
    AdmissionRecord,
    DestinationRecord,
    DropRecord,
    FlowRecord,
    LostRecord,
    Record,
    SourceRecord,
    StartRecord,
)
from tests.agent.flows.otlp_receiver import attributes

FIRST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LAST = FIRST + datetime.timedelta(seconds=1, microseconds=1)
TIME = FIRST + datetime.timedelta(seconds=2)
WEB = DestinationRecord(namespace="shop", pod="web")
CURL = SourceRecord(cgroup="/a.service", process="curl")


def flow(**changes: Any) -> FlowRecord:
    fields: dict[str, Any] = {
        **{"time": TIME, "node": "n1", "verdict": "AUDIT", "source": CURL, "destination": WEB},
        **{"protocol": 6, "port": 80, "has_many_ports": False, "mode": "audit", "packets": 5},
        **{"first": FIRST, "last": LAST},
    }
    return FlowRecord(**(fields | changes))


def drop(**changes: Any) -> DropRecord:
    fields: dict[str, Any] = {
        **{"time": LAST, "node": "n1", "verdict": "AUDIT", "reason": "node", "source": CURL},
        **{"destination": WEB, "protocol": 17, "destination_port": 53},
    }
    return DropRecord(**(fields | changes))


COMMON = {
    "k8s.namespace.name": "shop",
    "k8s.pod.name": "web",
    "process.linux.cgroup": "/a.service",
    "process.executable.name": "curl",
    "podgate.verdict": "AUDIT",
}
START = 1767225600 * 10**9
LAST_NS = START + 10**9 + 1000


@pytest.mark.parametrize(
    ("record", "times", "severity", "body", "expected"),
    [
        (
            flow(),
            (LAST_NS, START + 2 * 10**9),
            "INFO",
            "AUDIT 5 packets of curl in /a.service to shop/web tcp 80",
            {
                **COMMON,
                "network.transport": "tcp",
                "destination.port": 80,
                "podgate.has_many_ports": False,
                "podgate.mode": "audit",
                "podgate.packets": 5,
                "podgate.first": "2026-01-01T00:00:00+00:00",
            },
        ),
        (
            drop(),
            (LAST_NS, LAST_NS),
            "INFO",
            "AUDIT (node) curl in /a.service to shop/web udp 53",
            {
                **COMMON,
                "network.transport": "udp",
                "destination.port": 53,
                "podgate.reason": "node",
            },
        ),
        (
            AdmissionRecord(
                time=LAST, node="n1", policy="p", source="any", protocol="TCP", ports="80", flows=0
            ),
            (LAST_NS, LAST_NS),
            "INFO",
            "p admitted 0 flows of any",
            {
                "podgate.verdict": "FORWARDED",
                "podgate.policy": "p",
                "podgate.rule.source": "any",
                "podgate.rule.protocol": "TCP",
                "podgate.rule.ports": "80",
                "podgate.flows": 0,
            },
        ),
        (
            LostRecord(time=LAST, node="n1", place="queue", records=2, packets=9, since=FIRST),
            (LAST_NS, LAST_NS),
            "WARN",
            "Lost in queue: 2 records, 9 packets",
            {
                "podgate.lost.place": "queue",
                "podgate.lost.records": 2,
                "podgate.lost.packets": 9,
                "podgate.lost.since": "2026-01-01T00:00:00+00:00",
            },
        ),
        (
            StartRecord(time=FIRST, node="n1", version="1"),
            (START, START),
            "INFO",
            "podgate 1 records flows",
            {},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Record) else "",
)
def test_log_record_of_each_kind(
    record: Record, times: tuple[int, int], severity: str, body: str, expected: dict[str, Any]
) -> None:
    """times: of the last packet, and of the record."""
    found = otlp_records.log_record(record)
    number = {"INFO": logs_pb2.SEVERITY_NUMBER_INFO, "WARN": logs_pb2.SEVERITY_NUMBER_WARN}
    assert (found.time_unix_nano, found.observed_time_unix_nano) == times
    assert (found.severity_text, found.severity_number) == (severity, number[severity])
    assert found.body.string_value == body
    assert attributes(found.attributes) == expected


@pytest.mark.parametrize(
    ("record", "severity", "body"),
    [
        (
            flow(verdict="DROPPED", has_many_ports=True, port=0),
            "WARN",
            "DROPPED 5 packets of curl in /a.service to shop/web tcp many ports",
        ),
        (
            flow(protocol=1, port=0, source=SourceRecord(cgroup="/a.service")),
            "INFO",
            "AUDIT 5 packets of /a.service to shop/web icmp",
        ),
        (
            flow(destination=DestinationRecord(namespace="", pod="")),
            "INFO",
            "AUDIT 5 packets of curl in /a.service to a pod that ended tcp 80",
        ),
        (
            drop(verdict="DROPPED", source=SourceRecord(cgroup="/x", pod="mon/agent")),
            "WARN",
            "DROPPED (node) pod mon/agent to shop/web udp 53",
        ),
        (
            drop(destination_port=0, destination=DestinationRecord(namespace="", pod="")),
            "INFO",
            "AUDIT (node) curl in /a.service to a pod that ended udp",
        ),
    ],
)
def test_body_has_what_is_there(record: Record, severity: str, body: str) -> None:
    found = otlp_records.log_record(record)
    assert (found.severity_text, found.body.string_value) == (severity, body)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({}, None),
        ({"destination_address": "198.18.0.2"}, "ipv4"),
        ({"source_address": "198.18.0.1"}, "ipv4"),
        ({"source_address": "fd00::1"}, "ipv6"),
        ({"destination_address": "fd00::2", "source_address": "198.18.0.1"}, "ipv6"),
    ],
)
def test_family_is_that_of_an_address_that_is_there(
    addresses: dict[str, str], expected: str | None
) -> None:
    found = attributes(otlp_records.log_record(drop(**addresses)).attributes)
    assert found.get("network.type") == expected


def test_resource_without_a_cluster_has_no_node() -> None:
    found = attributes(otlp_records.resource("", "1").attributes)
    assert found == {"service.name": "podgate", "service.version": "1"}

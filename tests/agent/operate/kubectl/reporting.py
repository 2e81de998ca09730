"""Reports of agents, as the plugin gets them: made of the agents' own types."""

import datetime
import json
from typing import Any

import msgspec

from agent import VERSION, labels
from agent.admin import findings
from agent.admin.report import (
    AgentReport,
    PodSourceStatus,
    PodStatus,
    RawSocketStatus,
    RelayStatus,
)
from agent.pods.conditions import Condition

AT = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)

REPORT = AgentReport(
    version=VERSION,
    pid=1,
    started=AT,
    source_hash="0" * 16,
    attachment="tcx",
    programs="pinned",
    load_ms=1.0,
    is_synced=True,
    kubelet="/system.slice/kubelet.service",
    kubelet_problem="",
    http_address="127.0.0.1:9650",
    default_mode="audit",
    max_mode="strict",
    hooks=[],
    pod_source=PodSourceStatus(pods_from="the API server"),
    node_drops={},
    raw_sockets=RawSocketStatus(mode="audit", problem="", sources=[]),
    relay=RelayStatus(
        is_up=False,
        problem="",
        restarts=0,
        connections=0,
        held_syns=0,
        is_bypassed=False,
        unknown_address=0,
        gates=[],
    ),
    pods=[],
)


def report(*pods: PodStatus, **changes: Any) -> dict[str, Any]:
    """As `podgate status --output json` prints it."""
    return encoded(found_in(msgspec.structs.replace(REPORT, pods=list(pods), **changes)))


def found_in(report: AgentReport) -> AgentReport:
    """A report with its findings, as an agent makes it."""
    return msgspec.structs.replace(report, findings=findings.find(report))


def encoded(thing: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(thing))
    return found


def pod(
    name: str, mode: str, reason: str, *, status: str = "True", message: str = "Gated."
) -> PodStatus:
    """A pod of namespace shop. reason: of its condition; empty without a condition."""
    condition = Condition(labels.ISOLATION_READY, status, reason, message, AT)
    return PodStatus(
        namespace="shop",
        name=name,
        uid=name,
        mode=mode,
        source="api",
        netns=None,
        addresses=[],
        conditions=[condition] if reason else [],
        gates=[],
        paths=[],
        existing_flows=0,
        probes=[],
    )

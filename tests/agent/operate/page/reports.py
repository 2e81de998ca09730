"""Reports of an agent for the status page's tests."""

import asyncio
import datetime
from typing import Any

import msgspec

from agent.admin import findings
from agent.admin.report import (
    AgentReport,
    Drops,
    GateStatus,
    HookStatus,
    PathStatus,
    PodSourceStatus,
    PodStatus,
    ProbeStatus,
    RawSocketStatus,
    RelayStatus,
    SourceProcessStatus,
)
from agent.labels import ISOLATION_READY, PROBES_PASSING
from agent.pods.conditions import Condition

NOW = datetime.datetime(2026, 11, 22, 18, 0, tzinfo=datetime.UTC)


def condition(kind: str, status: str, reason: str, message: str = "") -> Condition:
    return Condition(kind, status, reason, message, NOW)


def probe(**fields: Any) -> ProbeStatus:
    defaults: dict[str, Any] = {
        "container": "app",
        "type": "Readiness",
        "handler": "http :8080/healthz",
        "result": "success",
        "last_message": "ok",
        "families": ["IPv4"],
        "successes": 3,
        "failures": 0,
        "recent_ms": [0.5, 1.0, None],
    }
    return ProbeStatus(**defaults | fields)


def pod(name: str = "web", **fields: Any) -> PodStatus:
    defaults: dict[str, Any] = {
        "namespace": "shop",
        "name": name,
        "uid": f"uid-{name}",
        "mode": "enforce",
        "source": "api",
        "netns": "/proc/7/ns/net",
        "addresses": ["198.18.1.1"],
        "conditions": [
            condition(ISOLATION_READY, "True", "Enforced"),
            condition(PROBES_PASSING, "True", "ProbesPassing"),
        ],
        "gates": [GateStatus(interface="veth1", ifindex=7, packets={"drop": {"node": 4}})],
        "paths": [PathStatus(address="198.18.1.1", result="confirmed")],
        "existing_flows": 0,
        "probes": [probe()],
    }
    return PodStatus(**defaults | fields)


def relay(**fields: Any) -> RelayStatus:
    defaults: dict[str, Any] = {
        "is_up": True,
        "problem": "",
        "restarts": 1,
        "connections": 2,
        "held_syns": 0,
        "is_bypassed": False,
        "unknown_address": 0,
        "gates": [],
    }
    return RelayStatus(**defaults | fields)


def report(*pods: PodStatus, **fields: Any) -> AgentReport:
    defaults: dict[str, Any] = {
        "version": "1.2.3",
        "pid": 42,
        "started": NOW - datetime.timedelta(hours=3),
        "source_hash": "abc",
        "attachment": "tcx",
        "programs": "pinned",
        "load_ms": 5.0,
        "is_synced": True,
        "kubelet": "/system.slice/kubelet.service",
        "kubelet_problem": "",
        "http_address": "127.0.0.1:9650",
        "default_mode": "audit",
        "max_mode": "strict",
        "hooks": [HookStatus(name="connect4", problem=None)],
        "pod_source": PodSourceStatus(pods_from="the API server"),
        "node_drops": {},
        "raw_sockets": RawSocketStatus(mode="audit", problem="", sources=[]),
        "relay": relay(),
        "pods": list(pods),
    }
    found = AgentReport(**defaults | fields)
    return msgspec.structs.replace(found, findings=findings.find(found))


def source(**fields: Any) -> SourceProcessStatus:
    defaults: dict[str, Any] = {
        "namespace": "shop",
        "pod": "web",
        "mode": "enforce",
        "protocol": "tcp",
        "port": 8080,
        "cgroup": "/system.slice/backup.service",
        "process": "curl",
        "packets": 12,
        "first": NOW - datetime.timedelta(hours=2),
        "last": NOW - datetime.timedelta(minutes=5),
    }
    return SourceProcessStatus(**defaults | fields)


def drops(*sources: SourceProcessStatus) -> Drops:
    return Drops(sources=list(sources), lost_packets=0)


class Reporter:
    """An agent with one pod and one source of drops; `reports` counts its reports."""

    def __init__(self) -> None:
        self.reports = 0

    async def report(self) -> AgentReport:
        self.reports += 1
        await asyncio.sleep(0)
        return report(pod())

    async def drops(self) -> Drops:
        return drops(source())

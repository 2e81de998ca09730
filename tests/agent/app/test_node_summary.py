"""The summary of a NodeReport has the numbers that `kubectl podgate status` makes of the report."""

import datetime

import msgspec
import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.app import node_summary
from agent.operate.kubectl import node_status
from agent.operate.kubectl.cluster import NodeAnswer
from agent.operate.kubectl.findings import is_problem
from agent.pods.conditions import Condition
from tests.agent.operate.cli.reports import STATUS, SWITCHED_OFF, TROUBLE


@pytest.mark.parametrize("report", [STATUS, TROUBLE, SWITCHED_OFF])
def test_numbers_are_those_of_status(report: AgentReport) -> None:
    summary = node_summary.of_report(report)
    text = msgspec.json.encode(report).decode()
    shown = node_status.read(NodeAnswer("a", text, is_ready=True))
    assert summary.desired == shown.desired
    assert summary.in_force == shown.in_force
    assert summary.problems == sum(map(is_problem, shown.findings))
    assert summary.has_kubelet == bool(shown.kubelet)
    assert (summary.default_mode, summary.max_mode) == (shown.default_mode, shown.max_mode)


def _conditions(*conditions: tuple[str, str, str]) -> list[Condition]:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return [Condition(kind, status, reason, "", now) for kind, status, reason in conditions]


def test_pods_count_by_mode_and_in_force_while_their_condition_is_true() -> None:
    template = STATUS.pods[0]
    passing = (labels.PROBES_PASSING, "True", "ProbesPassing")
    pods = [
        msgspec.structs.replace(template, mode=mode, conditions=_conditions(*conditions))
        for mode, *conditions in (
            ("strict", (labels.ISOLATION_READY, "True", "HostNetwork")),
            ("strict", passing, (labels.ISOLATION_READY, "True", "Strict")),
            ("strict", (labels.ISOLATION_READY, "True", "Enforced")),
            ("enforce", (labels.ISOLATION_READY, "False", "Enforced")),
            ("enforce", (labels.ISOLATION_READY, "True", "NewReason")),
            ("enforce", passing),
            ("audit",),
            ("audit", (labels.ISOLATION_READY, "True", "Audit")),
            ("off", (labels.ISOLATION_READY, "True", "Off")),
        )
    ]
    summary = node_summary.of_report(msgspec.structs.replace(STATUS, pods=pods))
    assert list(summary.desired.items()) == [
        *(("audit", 2), ("enforce", 3)),
        *(("off", 1), ("strict", 2)),
    ]
    assert list(summary.in_force.items()) == [
        *(("audit", 1), ("enforce", 1)),
        *(("off", 1), ("strict", 1)),
    ]

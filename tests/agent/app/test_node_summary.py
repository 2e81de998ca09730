"""The summary of a NodeReport has the numbers that `kubectl podgate status` makes of the report."""

import msgspec
import pytest

from agent.admin.report import AgentReport
from agent.app import node_summary
from agent.operate.kubectl import node_status
from agent.operate.kubectl.cluster import NodeAnswer
from agent.operate.kubectl.findings import is_problem
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

"""The memory of an agent and its relay stays within a budget."""

import sys

import pytest

from agent.admin.report import AgentReport
from agent.lab import agent_process
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab
from tests import processes
from tests.bench import answering, resting
from tests.kernel import cgroups
from tests.kernel.strictnode import RANGE4, RANGE6

pytestmark = pytest.mark.kernel

PODS = 20
PROBE = {"readinessProbe": {"tcpSocket": {"port": answering.PORT}}}
AGENT_MB, RELAY_MB = 51.0, 15.5
"""Measured were 42.5 and 12.9 (Python 3.11), and without other processes that share libraries up to
4 and 1 more; with gRPC an agent has 13 more, with cryptography or pyroute2 9 each."""


def test_agent_and_relay_stay_within_their_budgets(lab: Lab, operator: AgentProcess) -> None:
    # A forked agent shares pages with the process that it is forked from.
    operator.launch = agent_process.execute
    pods = [lab.add_pod(f"pod{number}", number) for number in range(1, PODS + 1)]
    for pod in pods:
        operator.write_manifest(pod, mode="strict", container=PROBE)

    def is_settled(report: AgentReport) -> bool:
        conditions = [one.status for pod in report.pods for one in pod.conditions]
        return len(report.pods) == PODS and set(conditions) == {"True"}

    paths = [pod.netns.path for pod in pods]
    command = [sys.executable, "-m", "tests.bench.answering", "tcp", "", "", *paths]
    with processes.served(command), cgroups.cgroup() as kubelet:
        operator.kubelet = (
            *("--kubelet", f"cgroup:{kubelet.path}"),
            *("--relay-range4", RANGE4, "--relay-range6", RANGE6),
        )
        operator.start()
        operator.wait_for("all pods as desired", is_settled)
        (relay,) = resting.children(operator.pid)
        assert resting.pss_mb(operator.pid) <= AGENT_MB
        assert resting.pss_mb(relay) <= RELAY_MB

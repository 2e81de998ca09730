"""A node with a real agent whose status page shows every state: drops, a failing pod, audit."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

from agent.admin.report import AgentReport
from agent.lab import agent_process, attempts
from agent.lab import cgroups as lab_cgroups
from agent.lab.lab import Lab
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import FAILURE_FILE, PORT, has_status
from agent.pods.conditions import FALSE

# Bars of each chart.
_PROBES = 12


@contextlib.contextmanager
def running() -> Iterator[tuple[str, DemoNode]]:
    """The page's address, and the node. The calling process is isolated (`lab.isolate`)."""
    with lab_cgroups.own() as cgroup, Lab() as network:
        node = DemoNode(network, cgroup)
        try:
            yield _start(node), node
        finally:
            FAILURE_FILE.unlink(missing_ok=True)
            node.end()


def _start(node: DemoNode) -> str:
    pods, agent = node.pods, node.agent
    pods.start_servers()
    pods.write_manifests("strict")
    agent.start(*node.options)
    agent.wait_for("isolation in strict", pods.are_isolated("Strict"))
    for pod in (pods.web, pods.cart):
        for family in attempts.FAMILIES:
            node.connect(pod, family, is_rejected=True)
    _set_mode(node, "rpc", "audit")
    _set_mode(node, "cart", "enforce")
    agent.wait_for("audit", lambda report: _reason(report, "rpc") == "Audit")
    node.connect(pods.rpc, "IPv4", is_rejected=False)
    agent.wait_for("some probes", lambda report: _probes(report, "web") >= _PROBES)
    FAILURE_FILE.touch()
    for family in attempts.FAMILIES:
        node.kubelet.probe("http", attempts.address_of(pods.web, family), PORT)
    agent.wait_for("a connection of the kubelet", lambda report: _is_relayed(report, "web"))
    report = agent.wait_for(
        "a failing pod", lambda report: has_status(report, pod=pods.shop, status=FALSE)
    )
    return f"http://{report.http_address}/"


def _set_mode(node: DemoNode, name: str, mode: str) -> None:
    path: pathlib.Path = node.agent.manifests / f"{name}.yaml"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["metadata"]["labels"] = {"podgate.io/mode": mode}
    node.agent.write_file(path.name, json.dumps(manifest))


def _reason(report: AgentReport, name: str) -> str:
    condition = agent_process.condition_of(report, name, "podgate.io/isolation-ready")
    return condition.reason if condition else ""


def _is_relayed(report: AgentReport, name: str) -> bool:
    pod = agent_process.pod_of(report, name)
    return pod is not None and bool(pod.relayed)


def _probes(report: AgentReport, name: str) -> int:
    pod = agent_process.pod_of(report, name)
    return min((len(probe.recent_ms) for probe in pod.probes), default=0) if pod else 0

"""The demo's pods: their interfaces, servers and manifests, and what the agent reports of them."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import agent_process, attempts, polling
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.pods.conditions import TRUE, Condition

PORT = 8080
PERIOD_SECONDS = 1
FAILURE_THRESHOLD = 2

FAILURE_FILE = labs.LAB_DIRECTORY / "shop-fails"
"""While it exists, the server in `shop` fails its probe."""

_Fields = dict[str, Any]

_PROBE: _Fields = {"periodSeconds": PERIOD_SECONDS, "failureThreshold": FAILURE_THRESHOLD}
_HTTP: _Fields = {"readinessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, **_PROBE}}
_GRPC: _Fields = {"readinessProbe": {"grpc": {"port": PORT}, **_PROBE}}
_TCP: _Fields = {"readinessProbe": {"tcpSocket": {"port": "main"}, **_PROBE}} | {
    "ports": [{"name": "main", "containerPort": PORT}]
}


class DemoPods:
    """Two routed and two bridged pods, each with a server."""

    def __init__(self, network: Lab, agent: AgentProcess) -> None:
        """agent: gets their manifests."""
        self.web = network.add_pod("web", 1)
        self.rpc = network.add_pod("rpc", 2)
        self.shop = network.add_pod("shop", 3, bridged=True)
        self.cart = network.add_pod("cart", 4, bridged=True)
        self.all = (self.web, self.rpc, self.shop, self.cart)
        self._agent = agent
        self._servers: list[subprocess.Popen[bytes]] = []

    def start_servers(self) -> None:
        """Raises `TimedOutError` if one does not respond."""
        kinds = {"web": ["http"], "rpc": ["grpc"], "cart": ["tcp"], "shop": ["http"]}
        for pod in self.all:
            rest = [str(FAILURE_FILE)] if pod is self.shop else []
            arguments = [*kinds[pod.name], str(PORT), *rest]
            command = [sys.executable, "-m", "agent.operate.demo.servers", *arguments]
            self._servers.append(labs.popen_in(pod.netns, command))
        for pod in self.all:
            polling.wait_until(
                f"a response of the server in {pod.name}", functools.partial(_responds, pod)
            )

    def kill_servers(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def write_manifests(self, mode: str) -> None:
        containers = {"web": _HTTP, "rpc": _GRPC, "shop": _HTTP, "cart": _TCP}
        for pod in self.all:
            self._agent.write_manifest(pod, mode=mode, container=containers[pod.name])

    def are_isolated(self, reason: str) -> Callable[[AgentReport], bool]:
        """Whether a report has every pod isolated for this reason."""
        names = [pod.name for pod in self.all]
        return functools.partial(agent_process.are_all_isolated, names=names, reason=reason)

    def fall_back_from_strict(self, report: AgentReport) -> bool:
        """Whether every pod's condition shows strict as unavailable."""
        return all(
            condition is not None and "Strict unavailable: " in condition.message
            for condition in self._isolations(report)
        )

    def isolation_reasons(self, report: AgentReport) -> str:
        """The reasons of all pods' conditions, each once."""
        return ", ".join(
            sorted({str(condition and condition.reason) for condition in self._isolations(report)})
        )

    def _isolations(self, report: AgentReport) -> list[Condition | None]:
        return [
            agent_process.condition_of(report, pod.name, labels.ISOLATION_READY) for pod in self.all
        ]

    def are_passing(self, report: AgentReport) -> bool:
        """Whether every pod's probes pass."""
        return all(has_status(report, pod=pod, status=TRUE) for pod in self.all)


def has_status(report: AgentReport, *, pod: LabPod, status: str) -> bool:
    """Whether the pod's condition probes-passing has this status."""
    condition = agent_process.condition_of(report, pod.name, labels.PROBES_PASSING)
    return condition is not None and condition.status == status


def _responds(pod: LabPod) -> bool:
    return attempts.connect_from_pod(pod, pod.ipv4, "IPv4", PORT) == "connects"

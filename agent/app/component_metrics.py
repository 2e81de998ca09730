"""Metrics of the agent's components: which of those that the node needs work now."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import core

from agent import state_files
from agent.app.ports import Ports
from agent.cni.installer import PluginStatus
from agent.default_deny.controller import DefaultDenyController
from agent.gates.worker import GateWorker
from agent.metrics import MetricFamily, labelled, single
from agent.policy.controller import PolicyController

if TYPE_CHECKING:
    from agent.app.cluster_outputs import ClusterOutputs
    from agent.sources.node_source import NodeSource
    from agent.strict.supervisor import RelaySupervisor

COMPONENT_UP = MetricFamily(
    "podgate_component_up",
    "gauge",
    "1 if a component works: hooks (at connect), default_deny (the table that blocks pods before "
    "their gate), relay, api_server (watches and writes), runtime, kubelet_pods_api, policies (all "
    "applied as written), cni_plugin, nri (the runtime calls the agent for new pods), http (the "
    "port for this machine), metrics (the one for others). Absent for one that the node does not "
    "need.",
    ("component",),
)
HOOK_ATTACHED = MetricFamily(
    "podgate_hook_attached",
    "gauge",
    "1 if the hook is attached to the root cgroup. Absent for one that the kernel does not accept, "
    "and while podgate is off.",
    ("hook",),
)
READY = MetricFamily(
    "podgate_ready",
    "gauge",
    "1 if the agent is ready, as /readyz reports with the reason. A ready agent's problem counts "
    "after 5 s.",
)
TURNS = MetricFamily(
    "podgate_node_turns_total",
    "counter",
    "Times that this process has held the node; over 1 if it took the node back from a newer agent "
    "that failed. An agent on standby serves no metrics.",
)

Check = Callable[[], bool | None]
"""Whether a component works; None where it is not needed."""


def checks(
    *,
    gate_worker: GateWorker,
    default_deny: DefaultDenyController,
    relays: "RelaySupervisor",
    policy: PolicyController,
    cni_status: PluginStatus | None,
    node: "NodeSource | None",
    outputs: "ClusterOutputs | None",
    ports: Ports,
) -> dict[str, Check]:
    """By component. cni_status, node, outputs: None where the node has none."""
    found: dict[str, Check] = {
        "hooks": lambda: gate_worker.has_connect_hooks if gate_worker.is_attached else None,
        "default_deny": lambda: default_deny.is_installed if default_deny.is_desired else None,
        "relay": lambda: relays.is_up if relays.is_needed else None,
        "policies": lambda: not policy.problems,
        "state": lambda: not state_files.unwritten(),
    }
    found["http"] = lambda: bool(ports.http.sockets)
    if metrics := ports.metrics:
        found["metrics"] = lambda: bool(metrics.sockets)
    if cni_status:
        found["cni_plugin"] = lambda: cni_status.is_installed
    if outputs:
        found["api_server"] = lambda: not outputs.api_problems
    if node:
        found["runtime"] = lambda: not node.sandboxes.problem
        if nri := node.nri:
            found["nri"] = lambda: nri.is_connected if nri.has_socket else None
        if outputs:  # Without the API server, a source that does not respond is worse.
            found["kubelet_pods_api"] = lambda: node.kubelet_pods.is_connected
    return found


class ComponentCollector:
    """`refresh` it before each scrape: hooks are read in a thread."""

    def __init__(
        self,
        gate_worker: GateWorker,
        checks: Mapping[str, Check],
        *,
        unready_reason: Callable[[], str | None],
        turns: Callable[[], int],
    ) -> None:
        """checks: by component; turns: times that this process has held the node."""
        self._gate_worker = gate_worker
        self._checks = checks
        self._unready_reason = unready_reason
        self._turns = turns
        self._hooks: Mapping[str, bool] = {}

    async def refresh(self) -> None:
        self._hooks = await self._gate_worker.hooks_attached()

    def collect(self) -> Iterator[core.Metric]:
        found = {name: check() for name, check in self._checks.items()}
        yield labelled(
            COMPONENT_UP, (((name,), is_up) for name, is_up in found.items() if is_up is not None)
        )
        yield labelled(HOOK_ATTACHED, (((name,), is_up) for name, is_up in self._hooks.items()))
        yield single(READY, self._unready_reason() is None)
        yield single(TURNS, self._turns())

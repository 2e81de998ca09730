"""Nodes that are in order by their NodeReports: one list, instead of an answer of each agent.

An agent writes that something is wrong within half a minute, and numbers of pods every five
minutes. A node counts as in order only while its agent's pod is Ready and its Node is; what is not
in order is for the agents to answer.

Lists are read by path. `kubectl get -o json` decodes and encodes them, which takes 25 times the CPU
time for the agents' pods of 1,000 nodes.
"""

import concurrent.futures
import dataclasses
import json
import urllib.parse
from typing import Any

from agent.operate.kubectl import agent_pods
from agent.operate.kubectl import nodes as node_facts
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import AGENTS, Cluster, KubectlError, Object
from agent.operate.kubectl.node_status import NodeStatus

REPORTS = "/apis/podgate.io/v1alpha1/nodereports"
NODES = "/api/v1/nodes"
FEW = 100
"""Nodes whose agents answer within seconds."""
_KUBELET = "identified"
_LIMIT = 1000
"""Objects of a response. A page is a process of kubectl; kubectl's own has 500."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """in_order: by name; others: names of all other nodes; agents: of all nodes."""

    in_order: dict[str, NodeStatus]
    others: list[str]
    agents: list[AgentPod]


def read(cluster: Cluster) -> Fleet | None:
    """None where all agents are to answer: in a small cluster, or without these rights."""
    try:
        reports = items(cluster, REPORTS)
        if len(reports) <= FEW:
            return None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            path = f"/api/v1/namespaces/{cluster.namespace}/pods"
            pods = pool.submit(items, cluster, path, labelSelector=AGENTS)
            nodes = pool.submit(items, cluster, NODES)
            daemonset = pool.submit(cluster.agent_daemonset)
            return fleet(daemonset.result(), nodes.result(), pods.result(), reports)
    except KubectlError:
        return None


def items(cluster: Cluster, path: str, **query: str) -> list[Object]:
    """All objects of a list of the API, as the API server sends them. Raises `KubectlError`."""
    found: list[Object] = []
    page = {**query, "limit": str(_LIMIT)}
    request = f"--request-timeout={cluster.timeout_seconds:.0f}s"
    while True:
        answer = json.loads(
            cluster.run("get", "--raw", f"{path}?{urllib.parse.urlencode(page)}", request)
        )
        found += answer["items"]
        following = (answer.get("metadata") or {}).get("continue")
        if not following:
            return found
        page["continue"] = following


def fleet(
    daemonset: Object, nodes: list[Object], pods: list[Object], reports: list[Object]
) -> Fleet:
    agents = {
        agent.node: agent for agent in agent_pods.youngest(pods, daemonset["metadata"]["name"])
    }
    by_name = {one["metadata"]["name"]: one.get("status") or {} for one in reports}
    every = node_facts.collect(daemonset, nodes, {*agents, *by_name})
    in_order = {
        node.name: status
        for node in every
        if not node.problem
        and (agent := agents.get(node.name))
        and (status := _in_order(agent, by_name.get(node.name) or {}))
    }
    others = [node.name for node in every if node.name not in in_order]
    return Fleet(in_order, others, list(agents.values()))


def _in_order(agent: AgentPod, report: dict[str, Any]) -> NodeStatus | None:
    """None if something is wrong, or not known."""
    summary = report.get("summary")
    if not summary or agent.problem or not agent.is_ready:
        return None
    desired, in_force = (dict(summary.get(key) or {}) for key in ("desired", "inForce"))
    if summary.get("problems") or not summary.get("hasKubelet") or desired != in_force:
        return None
    return NodeStatus(
        agent.node,
        version=str(report.get("agentVersion") or ""),
        is_ready=True,
        kubelet=_KUBELET,
        default_mode=str(summary.get("defaultMode") or ""),
        max_mode=str(summary.get("maxMode") or ""),
        desired=desired,
        in_force=in_force,
    )

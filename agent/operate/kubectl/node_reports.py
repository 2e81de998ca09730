"""Nodes that are in order by their NodeReports: one list, instead of an answer of each agent.

An agent writes that something is wrong within half a minute, and numbers of pods every five
minutes. A node counts as in order only while its agent's pod is Ready and its Node is; what is not
in order is for the agents to answer.
"""

import concurrent.futures
import dataclasses
from typing import Any

from agent.operate.kubectl import agent_pods
from agent.operate.kubectl import nodes as node_facts
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object
from agent.operate.kubectl.node_status import NodeStatus

REPORTS = "nodereports.podgate.io"
FEW = 100
"""Nodes whose agents answer within seconds."""
_KUBELET = "identified"


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """in_order: by name; others: names of all other nodes."""

    in_order: dict[str, NodeStatus]
    others: list[str]


def read(cluster: Cluster) -> Fleet | None:
    """None where all agents are to answer: in a small cluster, or without these rights."""
    try:
        reports = cluster.items_if_served(REPORTS)
        if len(reports) <= FEW:
            return None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pods = pool.submit(cluster.agent_pods)
            nodes = pool.submit(cluster.items, "nodes")
            daemonset = pool.submit(cluster.agent_daemonset)
            return fleet(daemonset.result(), nodes.result(), pods.result(), reports)
    except KubectlError:
        return None


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
    return Fleet(in_order, [node.name for node in every if node.name not in in_order])


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

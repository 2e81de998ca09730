"""The meshes of the node's pods, and whose probes go through their proxies."""

import collections

from agent.admin.report import AgentReport
from agent.listing import listed
from agent.operate import meshes
from agent.operate.doctor.results import Passed

_NAMED_PODS = 3


def check(report: AgentReport) -> list[Passed]:
    """One line for pods of which the same is true: nothing for nodes without a mesh. What is wrong
    is a finding of the agent. Blocks for a millisecond each pod."""
    pods: dict[str, list[str]] = collections.defaultdict(list)
    for pod in report.pods:
        if mesh := meshes.read(pod):
            pods[meshes.describe(pod, mesh)].append(pod.full_name)
    return [
        Passed("mesh", f"{listed(names, _NAMED_PODS)}: {text}.")
        for text, names in sorted(pods.items())
    ]

"""The mesh of a pod, by what listens and redirects in its network namespace, in words."""

import dataclasses
from collections.abc import Sequence

from agent.admin.report import PodStatus
from agent.pods import isolation
from agent.pods.conditions import TRUE
from probes import listening, meshes, redirection
from probes.netns import Netns, NetnsError
from probes.redirection import InnerWays


@dataclasses.dataclass(frozen=True, slots=True)
class PodMesh:
    """name: of the mesh, "a proxy" if that is not recognised; inner_ways: of the pod's addresses
    to which connections from inside are redirected."""

    name: str
    inner_ways: InnerWays


def read(pod: PodStatus) -> PodMesh | None:
    """None for a pod without a mesh, or whose namespace cannot be read. Blocks for a millisecond:
    connects to a port at which nothing listens."""
    if pod.netns is None:
        return None
    try:
        netns = Netns.open(pod.netns)
        name = meshes.name({found.port for found in listening.listeners(netns)})
        ways = redirection.find_inner_ways(netns, pod.addresses, {}).ways
    except (NetnsError, OSError):
        return None
    return PodMesh(name or "a proxy", ways) if name or ways else None


def describe(pod: PodStatus, mesh: PodMesh) -> str:
    """Whose probes go through the proxy: a sentence without its full stop."""
    clauses = [_of_kubelet(pod)]
    for way in list(mesh.inner_ways.values())[:1]:
        rules = f"connections from inside the pod are {way.redirection.text}"
        if way.user is None:
            clauses.append(f"{rules}, podgate's probes as well")
        else:
            exemption = f"podgate connects as user {way.user}, which the rules exempt"
            clauses.append(f"{rules}; {exemption}")
    if not mesh.inner_ways:
        clauses.append("podgate's own come from inside and reach the application")
    text = f"{mesh.name}: {'; '.join(clauses)}"
    if redirected := _redirected(pod):
        text += f"; no result of {', '.join(redirected)}"
    return text


def _of_kubelet(pod: PodStatus) -> str:
    is_strict = any(one.reason == isolation.STRICT and one.status == TRUE for one in pod.conditions)
    if is_strict:
        return "the kubelet's probes come from inside (strict), so its rules do not apply to them"
    return "the kubelet's probes come from outside, so its rules apply to them"


def _redirected(pod: PodStatus) -> Sequence[str]:
    return [f"{probe.container} {probe.type}" for probe in pod.probes if probe.is_redirected]

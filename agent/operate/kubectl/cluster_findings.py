"""What is wrong with podgate in a cluster and on no node alone: findings, by objects of the API."""

import concurrent.futures
import datetime
from collections.abc import Callable, Iterator

from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import webhooks
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object
from agent.operate.kubectl.findings import Finding, of_cluster
from agent.operate.kubectl.leftovers import POLICIES

_CONTROLLER = "podgate-controller"
# A node's agent is replaced within a minute: a new pod, and 30 s of minReadySeconds.
_STILL_SECONDS = 180.0
# Of a container that does not start by itself.
_STUCK = ("BackOff", "ErrImage", "Invalid", "Error")
# Reasons of Programmed that are no node's.
_WITHOUT_EFFECT = ("NoPodSelected", "NoSourceFound", "NoNodeSelected")
_NO_NAMESPACE = "NamespaceMissing"


def find(cluster: Cluster, *, now: datetime.datetime | None = None) -> list[Finding]:
    """All of them; those that the user may not read are left out."""
    at = now or datetime.datetime.now(datetime.UTC)
    parts: tuple[Callable[[], list[Finding]], ...] = (
        lambda: list(_roll_out(cluster, at)),
        lambda: list(_policies(cluster)),
        lambda: list(webhooks.find(cluster)),
    )

    def read(part: Callable[[], list[Finding]]) -> list[Finding]:
        try:
            return part()
        except KubectlError:
            return []

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        return [one for found in pool.map(read, parts) for one in found]


def _roll_out(cluster: Cluster, now: datetime.datetime) -> Iterator[Finding]:
    """A new version that does not reach all nodes."""
    daemonset = cluster.agent_daemonset()
    status = daemonset.get("status") or {}
    desired, updated = (
        int(status.get(key) or 0) for key in ("desiredNumberScheduled", "updatedNumberScheduled")
    )
    strategy = (daemonset["spec"].get("updateStrategy") or {}).get("type")
    if updated >= desired or strategy == "OnDelete":
        return
    pods = cluster.agent_pods()
    stuck = [text for pod in pods for text in _waiting(pod)]
    changes = [at for pod in pods for at in _changes(pod)]
    if stuck or (changes and (now - max(changes)).total_seconds() > _STILL_SECONDS):
        text = f"The roll-out of the agents does not continue, {updated} of {desired} nodes have it"
        yield of_cluster(kinds.ROLL_OUT_STUCK, f"{': '.join(filter(None, (text, *stuck[:1])))}.")


def _waiting(pod: Object) -> Iterator[str]:
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        reason = str(((one.get("state") or {}).get("waiting") or {}).get("reason") or "")
        if any(word in reason for word in _STUCK):
            yield f"{pod['metadata']['name']} on {pod['spec'].get('nodeName', '-')}: {reason}"


def _changes(pod: Object) -> Iterator[datetime.datetime]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    times = [pod["metadata"].get("creationTimestamp")]
    times += [one.get("lastTransitionTime") for one in conditions]
    return (datetime.datetime.fromisoformat(str(at)) for at in times if at)


def _policies(cluster: Cluster) -> Iterator[Finding]:
    """Policies without an effect, or with names of namespaces that do not exist, and a controller
    that is missing, which finds these."""
    policies = cluster.items_if_served(POLICIES)
    yield from _controller(cluster, policies)
    for policy in policies:
        conditions = (policy.get("status") or {}).get("conditions") or ()
        found = {one["type"]: one for one in conditions}
        accepted, programmed = found.get("Accepted", {}), found.get("Programmed", {})
        name = policy["metadata"]["name"]
        if accepted.get("reason") == _NO_NAMESPACE:
            text = f"Policy {name}: {accepted.get('message', '')}"
            yield of_cluster(kinds.POLICY_NAMESPACE_MISSING, text, f"policy {name}")
        elif programmed.get("reason") in _WITHOUT_EFFECT:
            text = f"Policy {name}: {programmed.get('message', '')}"
            yield of_cluster(kinds.POLICY_WITHOUT_EFFECT, text, f"policy {name}")


def _controller(cluster: Cluster, policies: list[Object]) -> Iterator[Finding]:
    """It is missing if it is installed, or if policies wait for their status."""
    where = f"--namespace={cluster.namespace}"
    found = cluster.items("deployments", where, "-l", f"app.kubernetes.io/name={_CONTROLLER}")
    waiting = sum("status" not in policy for policy in policies)
    available = sum(int((one.get("status") or {}).get("availableReplicas") or 0) for one in found)
    if available or not (found or waiting):
        return
    desired = sum(int(one["spec"].get("replicas", 1)) for one in found)
    text = f"No controller runs ({desired} replicas are desired): policies get no status"
    yield of_cluster(kinds.CONTROLLER_MISSING, f"{text}.")

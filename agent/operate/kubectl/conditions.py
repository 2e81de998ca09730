"""podgate's conditions of pods, once no agent maintains them.

A pod with a readiness gate of podgate is Ready only while the condition is True, so it stays True,
with reason `Removed`. The kubelet keeps conditions that are not its own. Conditions of pods without
such a gate are deleted.
"""

import concurrent.futures
import datetime
import json
from collections.abc import Iterable
from typing import Any

from agent.labels import ISOLATION_READY, POLICY_READY, PROBES_PASSING
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

CONDITIONS = (ISOLATION_READY, PROBES_PASSING, POLICY_READY)
REMOVED = "Removed"
_MESSAGE = "podgate is removed from this cluster; nothing maintains this condition any more."

# Each is a process of kubectl.
_AT_ONCE = 16
_ENDED = ("Succeeded", "Failed")
# The pod is gone, or another one has its name: the patch names the uid.
_GONE = ("NotFound", "Conflict", "Invalid")
_MERGE = "--type=strategic"


def settle(cluster: Cluster) -> tuple[int, list[str]]:
    """One pass over all pods of the cluster. Returns how many were patched, and the problems."""
    names = [found["metadata"]["name"] for found in cluster.items("namespaces")]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        # By namespace, so that no response has the 150,000 pods of a large cluster.
        patched, problems = 0, []
        for pods in pool.map(lambda name: cluster.items("pods", f"--namespace={name}"), names):
            changes = [(pod, patch) for pod in pods if (patch := patch_of(pod))]
            for problem in pool.map(lambda change: _apply(cluster, *change), changes):
                patched += not problem
                problems += [problem] if problem else []
    return patched, problems


def patch_of(pod: Object) -> Object | None:
    """The strategic merge patch of a pod's status; None if it is as it should be."""
    gates = gates_of(pod["spec"])
    status = pod.get("status", {})
    current = {one["type"]: one for one in status.get("conditions", ())}
    changes: list[Object] = []
    for kind in CONDITIONS:
        found = current.get(kind)
        if kind not in gates:
            if found:
                changes.append({"$patch": "delete", "type": kind})
        elif status.get("phase") not in _ENDED and not _is_removed(found):
            changes.append(_removed(kind, found))
    if not changes:
        return None
    return {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": changes}}


def gates_of(spec: Object) -> set[str]:
    """podgate's readiness gates in a pod's spec."""
    found = {gate["conditionType"] for gate in spec.get("readinessGates") or ()}
    return found.intersection(CONDITIONS)


def gated_templates(cluster: Cluster) -> list[str]:
    """Workloads whose pod template has a readiness gate of podgate, as kind/namespace/name: after
    the removal no new pod of theirs becomes Ready."""
    found = []
    for workload in cluster.items(
        "deployments,statefulsets,daemonsets,replicasets,replicationcontrollers,jobs,cronjobs",
        "--all-namespaces",
    ):
        metadata = workload["metadata"]
        owned = any(owner.get("controller") for owner in metadata.get("ownerReferences", ()))
        if not owned and gates_of(_template(workload)):
            kind = workload["kind"].lower()
            found.append(f"{kind}/{metadata['namespace']}/{metadata['name']}")
    return sorted(found)


def _template(workload: Object) -> Object:
    spec = workload["spec"]
    job: Any = spec.get("jobTemplate")
    template: Any = (job["spec"] if job else spec).get("template") or {}
    found: Object = template.get("spec", {})
    return found


def _is_removed(condition: Object | None) -> bool:
    return condition is not None and (condition["status"], condition.get("reason")) == (
        "True",
        REMOVED,
    )


def _removed(kind: str, current: Object | None) -> Object:
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if current and current["status"] == "True":
        since = current.get("lastTransitionTime") or since
    return {
        "type": kind,
        "status": "True",
        "reason": REMOVED,
        "message": _MESSAGE,
        "lastTransitionTime": since,
    }


def _apply(cluster: Cluster, pod: Object, patch: Object) -> str:
    """Returns one sentence if it failed."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    place = (f"--namespace={namespace}", "--subresource=status", _MERGE)
    try:
        cluster.run("patch", "pod", name, *place, f"--patch={json.dumps(patch)}")
    except KubectlError as error:
        if any(f"({reason})" in str(error) for reason in _GONE):
            return ""
        return f"pod {namespace}/{name}: {error}"
    return ""


def describe(problems: Iterable[str]) -> str:
    """The first of several problems, and how many more there are."""
    first, *others = problems
    return first + (f" (and {len(others)} more)" if others else "")

"""What the API server has of a pod's readiness, as the agent last saw it: the kubelet's part."""

from collections.abc import Iterator

from agent.admin.report import PodStatus
from agent.kube.objects import ApiPod
from agent.operate.explain.model import Check
from agent.pods.conditions import TRUE


def checks(pod: ApiPod, status: PodStatus | None) -> Iterator[Check]:
    """Of each readiness gate, and of the kubelet's conditions. status: None without an agent."""
    own = {c.type: c.status for c in status.conditions} if status else {}
    for gate in sorted(pod.gates):
        found = pod.condition(gate)
        value = found.status if found else "not set"
        hint = "its owner sets it, not podgate"
        if gate in own:
            hint = "podgate has it True and writes it" if own[gate] == TRUE else ""
        yield _check("readiness gate", f"{gate} is {value}", hint, is_well=value == TRUE)
    describe = f"kubectl describe pod -n {pod.metadata.namespace} {pod.metadata.name}"
    for kind in ("ContainersReady", "Ready"):
        if (found := pod.condition(kind)) is not None:
            text = f"{kind} is {found.status}"
            if found.status != TRUE:
                text += f": {found.message or found.reason or _unready_containers(pod)}"
            yield _check("API server", text, describe, is_well=found.status == TRUE)


def _check(name: str, text: str, hint: str, *, is_well: bool) -> Check:
    if is_well:
        return Check(name=name, state="ok", text=text)
    return Check(name=name, state="problem", text=text, next=hint)


def _unready_containers(pod: ApiPod) -> str:
    unready = [status.name for status in pod.status.container_statuses if not status.ready]
    return f"not ready: {', '.join(unready)}" if unready else "no reason"

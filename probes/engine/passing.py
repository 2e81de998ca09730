"""Whether a pod's probes pass, in one reason and one sentence: the condition's content."""

from probes.engine.slots import PodSlots, Slot
from probes.engine.targets import ProbedContainer, ProbeKey
from probes.engine.workers import ProbeType
from probes.results import ProbeResult


def passing(pod: PodSlots | None) -> tuple[bool, str, str]:
    """Whether startup and readiness of all containers pass; with a reason and a sentence.

    Reasons: ProbesPassing, NoProbes (passing, too: there is nothing to
    fail), ProbeFailing, ProbePending (no result yet), ContainerNotRunning,
    NotScheduled (no such pod). Liveness is the kubelet's to act upon.
    """
    if pod is None:
        return False, "NotScheduled", "no probes are scheduled for this pod"
    count = 0
    for container in pod.target.containers:
        name = container.probes.name
        for type in (ProbeType.STARTUP, ProbeType.READINESS):
            slot = pod.slots.get(ProbeKey(pod.target.uid, name, type))
            if slot is None:
                continue
            count += 1
            if problem := _problem(slot, container):
                return False, *problem
    if not count:
        return True, "NoProbes", "no container has a startup or readiness probe to run here"
    if count == 1:
        return True, "ProbesPassing", "the only probe of startup and readiness passes"
    return True, "ProbesPassing", f"all {count} probes of startup and readiness pass"


def _problem(slot: Slot, container: ProbedContainer) -> tuple[str, str] | None:
    """Why this probe does not pass: a reason and a sentence."""
    name, type = slot.key.container, slot.key.type.lower()
    if type == "startup" and container.started:
        return None
    if not container.container_id or not container.running:
        return "ContainerNotRunning", f'container "{name}" is not running'
    if slot.worker.cached is ProbeResult.SUCCESS:
        return None
    outcome = slot.outcome
    if outcome is None:
        return "ProbePending", f'container "{name}": {type} probe has no result yet'
    if outcome.passed:
        seen, needed = slot.worker.streak, slot.worker.probe.success_threshold
        return (
            "ProbePending",
            f'container "{name}": {type} probe has succeeded {seen} of {needed} times',
        )
    return "ProbeFailing", f'container "{name}": {type} probe failed: {outcome.message}'

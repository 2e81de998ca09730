"""Whether a pod's probes pass: the content of the condition probes-passing."""

from probes.engine.slots import PodSlots, Slot
from probes.engine.targets import ProbedContainer, ProbeKey
from probes.engine.workers import ProbeType
from probes.results import ProbeResult


def passing(pod: PodSlots | None) -> tuple[bool, str, str]:
    """Whether startup and readiness of all containers pass, with a reason and a sentence.

    Reasons: ProbesPassing, NoProbes (passing, too: nothing can fail), ProbeFailing, ProbePending
    (no result yet), ProbeRedirected (none, since another process accepts),
    ProbeCertificateUnusable (none, for lack of a client certificate), ContainerNotRunning,
    NotScheduled (no such pod). The kubelet alone acts on liveness.
    """
    if pod is None:
        return False, "NotScheduled", "No probes scheduled for this pod."
    count = 0
    notes = ""
    for container in pod.target.containers:
        name = container.probes.name
        for type in (ProbeType.STARTUP, ProbeType.READINESS):
            slot = pod.slots.get(ProbeKey(pod.target.uid, name, type))
            if slot is None:
                continue
            count += 1
            if problem := _problem(slot, container):
                return False, *problem
            if slot.outcome is not None and slot.outcome.shows_nothing:
                probe = f'{type.lower()} probe of container "{name}"'
                notes += f" Not newer than that: {probe}. {slot.outcome.message}"
    if not count:
        return True, "NoProbes", "No container has a startup or readiness probe that podgate runs."
    if count == 1:
        return True, "ProbesPassing", f"The only startup or readiness probe passes.{notes}"
    return True, "ProbesPassing", f"All {count} startup and readiness probes pass.{notes}"


def _problem(slot: Slot, container: ProbedContainer) -> tuple[str, str] | None:
    """Why this probe does not pass: a reason and a sentence."""
    name, type = slot.key.container, slot.key.type.lower()
    if type == "startup" and container.started:
        return None
    if not container.container_id or not container.running:
        return "ContainerNotRunning", f'Container "{name}" is not running.'
    if slot.worker.cached is ProbeResult.SUCCESS:
        return None
    outcome = slot.outcome
    if outcome is None:
        return "ProbePending", f'Container "{name}": {type} probe has no result yet.'
    if outcome.passed:
        seen, needed = slot.worker.streak, slot.worker.probe.success_threshold
        return (
            "ProbePending",
            f'Container "{name}": {type} probe succeeded {seen} of {needed} times.',
        )
    if outcome.shows_nothing:
        text = f'Container "{name}": {type} probe has no result. {outcome.message}'
        return "ProbeRedirected" if outcome.is_redirected else "ProbeCertificateUnusable", text
    failure = outcome.message.removesuffix(".")
    return "ProbeFailing", f'Container "{name}": {type} probe failed: {failure}.'

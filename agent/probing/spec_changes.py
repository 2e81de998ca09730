"""Changes of a running pod's probes (KEP-6318): the annotation in force, and what has changed."""

from collections.abc import Iterator

import msgspec
import structlog

from agent.logs import Event
from agent.pods.events import PodEvent, PodEvents
from agent.pods.pod import Pod
from agent.probing.result_store import ResultStore, SavedProbes
from probes.engine.targets import probe_of
from probes.engine.workers import ProbeType
from probes.spec import probespec
from probes.spec.definitions import ContainerProbes
from probes.spec.specs import PodSpec, with_annotation

log = structlog.get_logger(__name__)

REASON = "ContainerProbeChanged"
"""Of the Event; KEP-6318 names it."""


class ProbeChange(msgspec.Struct, frozen=True):
    """A probe that podgate runs otherwise than before."""

    container: str
    type: ProbeType
    action: str
    """added, updated or removed."""

    def __str__(self) -> str:
        return f'Container "{self.container}": {self.type.lower()} probe {self.action}.'


class SpecChanges:
    """Follows the annotation `podgate.io/probe-spec` of all pods, and reports changed probes."""

    def __init__(self, results: ResultStore, events: PodEvents) -> None:
        self._results = results
        self._events = events
        self._rejected: dict[str, str | None] = {}
        """By pod: the invalid text in place of which the last valid one stays in force."""
        self._specs: dict[str, PodSpec] = {}
        """As they were last in force."""

    def take(self, pod: Pod, sandbox: SavedProbes) -> Pod:
        """The pod with the annotation that is in force.

        A change that podgate would reject in a new pod changes nothing: the last valid text stays
        in force, over restarts of the agent too.
        """
        now = pod.spec.annotation
        if not any(map(probespec.is_annotation_error, pod.spec.errors)):
            self._rejected.pop(pod.uid, None)
            if not sandbox.is_taken or sandbox.annotation != now:
                sandbox.annotation, sandbox.is_taken = now, True
                self._results.save_soon()
        elif sandbox.is_taken:
            if self._rejected.get(pod.uid) != now:
                self._rejected[pod.uid] = now
                log.warning(
                    Event.PROBE_SPEC_REJECTED,
                    pod=pod.full_name,
                    uid=pod.uid,
                    annotation=probespec.ANNOTATION,
                )
            spec = with_annotation(pod.spec, sandbox.annotation)
            pod = msgspec.structs.replace(pod, spec=spec)
        self._report(pod)
        return pod

    def text(self, uid: str) -> str:
        """What a pod's message ends with while a change is rejected."""
        if uid not in self._rejected:
            return ""
        return f" The changed {probespec.ANNOTATION} is invalid; the last valid one is in force."

    def forget(self, uid: str) -> None:
        self._rejected.pop(uid, None)
        self._specs.pop(uid, None)

    def _report(self, pod: Pod) -> None:
        before, self._specs[pod.uid] = self._specs.get(pod.uid), pod.spec
        if before is None or before is pod.spec:
            return
        for change in changes(before, pod.spec):
            log.info(
                Event.PROBE_CHANGED,
                pod=pod.full_name,
                uid=pod.uid,
                container=change.container,
                probe=change.type.lower(),
                action=change.action,
            )
            event = PodEvent(
                *(pod.uid, REASON, str(change)),
                action="Probing",
                container=change.container,
                about=f"{change.type} {change.action}",
                is_warning=False,
            )
            self._events.record(event)


def changes(before: PodSpec, after: PodSpec) -> Iterator[ProbeChange]:
    """The probes that podgate runs otherwise than before, unless the kubelet runs the same ones:
    then it reports the change."""
    for container in after.containers:
        old = _named(before.containers, container.name)
        if old == container:
            continue
        base_before = _named(before.base, container.name)
        base = _named(after.base, container.name)
        for type in ProbeType:
            was, now = probe_of(old, type), probe_of(container, type)
            is_of_kubelet = was == probe_of(base_before, type) and now == probe_of(base, type)
            if was != now and not is_of_kubelet:
                action = "added" if was is None else "removed" if now is None else "updated"
                yield ProbeChange(container.name, type, action)


def _named(containers: tuple[ContainerProbes, ...], name: str) -> ContainerProbes | None:
    return next((container for container in containers if container.name == name), None)

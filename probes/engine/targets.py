"""The scheduler's input, pods and containers, and its output, the state of their probes."""

from collections.abc import Iterator, Mapping

import msgspec

from probes.engine.families import NO_INTERFACES, PodInterfaces
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.protocols.client_certificates import NO_CERTIFICATES, Certificates
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import ContainerProbes, Exec, Probe


class ProbeKey(msgspec.Struct, frozen=True, order=True):
    """One probe of one container of one pod."""

    uid: str
    container: str
    type: ProbeType


class ProbedContainer(msgspec.Struct, frozen=True):
    """A container to probe, and its state."""

    probes: ContainerProbes
    container_id: str = ""
    """Empty before it is created. A new id means that it was restarted."""
    started_at: float = 0.0
    """Unix time in seconds."""
    running: bool = True
    restarts: bool = True
    """Whether it will be restarted when it exits (restartPolicy)."""
    started: bool | None = None
    """Its `status.containerStatuses[].started`; None: podgate's own startup probe decides."""
    restored: Mapping[ProbeType, ProbeResult] = {}
    """Results of this container id from before the agent's restart."""
    started_by_kubelet: bool = False
    """Whether the kubelet reports it as started: it sends no startup probes any more."""


class ProbedPod(msgspec.Struct, frozen=True):
    """A pod to probe."""

    uid: str
    """Identifies the pod; the agent uses the sandbox."""
    netns: Netns
    addresses: tuple[str, ...]
    """The pod's own, the preferred one first."""
    containers: tuple[ProbedContainer, ...]
    deleting: bool = False
    interfaces: PodInterfaces = NO_INTERFACES
    netns_id: int | None = None
    """What the kernel calls the network namespace in the agent's own (RTM_GETNSID); without it all
    probes connect."""
    is_loopback_down: bool = False
    certificates: Certificates = NO_CERTIFICATES
    """Client certificates that its probes name."""

    def has_addresses_of(self, other: "ProbedPod") -> bool:
        """Whether probes of both dial the same addresses."""
        return (self.addresses, self.interfaces) == (other.addresses, other.interfaces)


class ProbeState(msgspec.Struct, frozen=True):
    """One probe as `podgate status` shows it."""

    key: ProbeKey
    result: ProbeResult | None
    """The result that counts; None before the container is known."""
    outcome: ProbeOutcome | None
    """The last finished probe, its text cut."""
    streak: int
    """Number of equal results in a row, up to the last."""
    passed: int
    failed: int
    errors: int
    """Discarded results, of prober errors."""
    in_flight: bool
    is_paused: bool
    due_in_seconds: float | None
    """None if no probe is scheduled."""
    lookups_differ: bool = False
    """Connections failed although lookups found a listener with room, so the probe connects."""


def probe_of(container: ContainerProbes | None, type: ProbeType) -> Probe | None:
    """A container's probe of a type."""
    if container is None:
        return None
    match type:
        case ProbeType.STARTUP:
            return container.startup
        case ProbeType.READINESS:
            return container.readiness
        case ProbeType.LIVENESS:
            return container.liveness


def desired_probes(target: ProbedPod) -> Iterator[tuple[ProbeKey, Probe]]:
    """The probes of a pod that podgate runs: all but exec, which is the kubelet's."""
    for container in target.containers:
        for type in ProbeType:
            probe = probe_of(container.probes, type)
            if probe is not None and not isinstance(probe.handler, Exec):
                yield ProbeKey(target.uid, container.probes.name, type), probe

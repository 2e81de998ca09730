"""API objects, with only the fields that podgate reads.

Other fields are skipped while decoding, so environment values, managed fields and last-applied
configurations are in no report and no file. `ApiPod.whole` has them, in memory only.

What is left of an object is bounded, whatever its author wrote into its 1.5 MB: an agent has the
pods of all tenants of its node in memory.
"""

import dataclasses
import sys
from typing import Any, Final, Protocol

import msgspec

from agent import labels as agent_labels
from agent.listing import full_name
from probes.spec import networks

MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On the API's copy of a static pod: the uid that the kubelet and the runtime use for it."""


# A pod's probes, hooks and ports in memory: half of it is 100 containers with three probes each.
_MAX_SPEC_BYTES: Final = 1 << 20
TOO_LARGE: Final = "(more than podgate reads)"
"""Instead of probes, hooks or ports beyond that: of a wrong type, so it is reported as such."""
# Usual objects have up to 50 labels, and pods up to three readiness gates.
_MAX_LABELS: Final = 256
_MAX_READINESS_GATES: Final = 256

# Of 250 pods; a usual pod has 3 to 40 KiB, of which half are managed fields.
_MAX_WHOLE_BYTES: Final = 256 << 10


class StatusCause(msgspec.Struct, frozen=True):
    """One entry of a Status' `details.causes`."""

    reason: str = ""
    message: str = ""
    field: str = ""


class ApiStatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    """metav1.StatusDetails."""

    causes: tuple[StatusCause, ...] = ()
    retry_after_seconds: float = 0


class ApiStatus(msgspec.Struct, frozen=True):
    """metav1.Status: the error of a request, as a body or as the object of an ERROR event."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: ApiStatusDetails | None = None


class ObjectMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """metav1.ObjectMeta; of the annotations only podgate's, the mirror's and the networks', and of
    the labels 256, podgate's first."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None

    def __post_init__(self) -> None:
        kept = {name: text for name, text in self.annotations.items() if _is_kept(name)}
        msgspec.structs.force_setattr(self, "annotations", kept)
        if len(self.labels) > _MAX_LABELS:
            # podgate's own first.
            names = sorted(self.labels, key=lambda name: not _is_ours(name))[:_MAX_LABELS]
            first = {name: self.labels[name] for name in names}
            msgspec.structs.force_setattr(self, "labels", first)

    @property
    def full_name(self) -> str:
        """ "namespace/name"; the name alone for an object without a namespace."""
        return full_name(self.namespace, self.name)


class ApiObject(Protocol):
    """Anything that can be watched."""

    @property
    def metadata(self) -> ObjectMetadata: ...


class MetadataOnly(msgspec.Struct, frozen=True):
    """metav1.PartialObjectMetadata: what podgate requests of namespaces and nodes."""

    metadata: ObjectMetadata


class ApiContainer(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """v1.Container: probes and hooks, unvalidated; probes/spec/specs.py checks each field."""

    name: Any = None
    ports: Any = None
    startup_probe: Any = None
    readiness_probe: Any = None
    liveness_probe: Any = None
    lifecycle: Any = None
    restart_policy: Any = None


_OF_ANY_SIZE: Final = ("ports", "startup_probe", "readiness_probe", "liveness_probe", "lifecycle")


class ReadinessGate(msgspec.Struct, frozen=True, rename="camel"):
    """A condition that must be True before the kubelet reports Ready."""

    condition_type: str


class ApiPodSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """v1.PodSpec."""

    node_name: str = ""
    host_network: bool = False
    service_account_name: str = ""
    restart_policy: str = "Always"
    init_containers: tuple[ApiContainer, ...] = ()
    containers: tuple[ApiContainer, ...] = ()
    readiness_gates: tuple[ReadinessGate, ...] = ()

    def __post_init__(self) -> None:
        gates = self.readiness_gates
        if len(gates) > _MAX_READINESS_GATES:
            # podgate's own first; some are there twice.
            ours = (gate for gate in gates if _is_ours(gate.condition_type))
            first = tuple(dict.fromkeys((*ours, *gates)))[:_MAX_READINESS_GATES]
            msgspec.structs.force_setattr(self, "readiness_gates", first)
        left = _MAX_SPEC_BYTES
        for container in (*self.init_containers, *self.containers):
            for name in _OF_ANY_SIZE:
                value = getattr(container, name)
                size = 0 if value is None else _bytes(value, left)
                if size <= left:
                    left -= size
                elif value != TOO_LARGE:
                    msgspec.structs.force_setattr(container, name, TOO_LARGE)


class PodCondition(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """v1.PodCondition. last_transition_time: RFC 3339 in whole seconds, as the API writes it."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_probe_time: str | None = None
    last_transition_time: str | None = None
    observed_generation: int | None = None


class PodIp(msgspec.Struct, frozen=True, omit_defaults=True):
    """An address in the API, which shows it later than the pod has it."""

    ip: str = ""


class ContainerRunning(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """v1.ContainerStateRunning; the time is RFC 3339."""

    started_at: str | None = None


class ApiContainerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """v1.ContainerState: only whether, and since when, the container runs."""

    running: ContainerRunning | None = None


class ContainerStatus(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """v1.ContainerStatus. container_id: with the runtime's scheme, `containerd://...`."""

    name: str
    container_id: str = msgspec.field(default="", name="containerID")
    ready: bool = False
    started: bool | None = None
    restart_count: int = 0
    state: ApiContainerState = ApiContainerState()


class ApiPodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """v1.PodStatus."""

    phase: str = ""
    pod_ips: tuple[PodIp, ...] = msgspec.field(default=(), name="podIPs")
    conditions: tuple[PodCondition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WholePod:
    """A v1.Pod with all fields, as received: for clients of the pods API, which only root is."""

    content: bytes
    is_json: bool
    """Otherwise protobuf."""


class ApiPod(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """v1.Pod."""

    metadata: ObjectMetadata
    spec: ApiPodSpec = ApiPodSpec()
    status: ApiPodStatus = ApiPodStatus()

    @property
    def uid(self) -> str:
        """The uid that the kubelet and the runtime use; for a static pod it is not the API's."""
        return self.metadata.annotations.get(MIRROR_ANNOTATION) or self.metadata.uid

    @property
    def whole(self) -> WholePod | None:
        """All fields; None if they were not kept. Neither compared nor saved."""
        found: WholePod | None = self.__dict__.get("whole")
        return found

    def keep_whole(self, whole: WholePod | None) -> None:
        """Keep all fields, if they are of a usual size. Call it before others get the object."""
        if whole and len(whole.content) <= _MAX_WHOLE_BYTES:
            self.__dict__["whole"] = whole

    @property
    def is_mirror(self) -> bool:
        return MIRROR_ANNOTATION in self.metadata.annotations

    @property
    def gates(self) -> frozenset[str]:
        """The condition types of the pod's readiness gates."""
        return frozenset(gate.condition_type for gate in self.spec.readiness_gates)

    def condition(self, kind: str) -> PodCondition | None:
        return next((found for found in self.status.conditions if found.type == kind), None)


def is_not_newer(version: str, than: str) -> bool:
    """Whether a resource version is certainly not newer than another.

    Comparable as numbers since KEP-5504, and in practice before. Other values are never older.
    """
    return version.isdecimal() and than.isdecimal() and int(version) <= int(than)


def newest(of_api: ApiPod | None, of_kubelet: ApiPod | None) -> ApiPod | None:
    """The object with the newer version; the API server's if that is unknown."""
    if of_api is None or of_kubelet is None:
        return of_api or of_kubelet
    version = of_kubelet.metadata.resource_version
    # The kubelet's own manifest of a static pod has no version: the API's copy has more.
    if not version or is_not_newer(version, of_api.metadata.resource_version):
        return of_api
    return of_kubelet


def _is_kept(annotation: str) -> bool:
    is_other = annotation in (MIRROR_ANNOTATION, networks.STATUS_ANNOTATION)
    return is_other or _is_ours(annotation)


def _is_ours(name: str) -> bool:
    return name.startswith(f"{agent_labels.DOMAIN}/")


def _bytes(value: object, limit: int) -> int:
    """The memory of a decoded value; of one with more than `limit` bytes some number above it."""
    total = 0
    open_values = [value]
    while open_values and total <= limit:
        value = open_values.pop()
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            open_values += value.keys()
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
    return total

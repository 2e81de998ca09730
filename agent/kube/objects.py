"""API objects, with only the fields that podgate reads.

Other fields are skipped while decoding, so environment values, managed fields and last-applied
configurations are in no report and no file. `ApiPod.whole` has them, in memory only.
"""

import dataclasses
from typing import Any, Final, Protocol

import msgspec

from agent import labels as agent_labels
from probes.spec import networks

MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On the API's copy of a static pod: the uid that the kubelet and the runtime use for it."""


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
    """metav1.ObjectMeta; of the annotations only podgate's, the mirror's and the networks'."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None

    def __post_init__(self) -> None:
        kept = {name: text for name, text in self.annotations.items() if _is_kept(name)}
        msgspec.structs.force_setattr(self, "annotations", kept)

    @property
    def full_name(self) -> str:
        """ "namespace/name"; the name alone for an object without a namespace."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


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


class ReadinessGate(msgspec.Struct, frozen=True, rename="camel"):
    """A condition that must be True before the kubelet reports Ready."""

    condition_type: str


class ApiPodSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """v1.PodSpec."""

    node_name: str = ""
    host_network: bool = False
    restart_policy: str = "Always"
    init_containers: tuple[ApiContainer, ...] = ()
    containers: tuple[ApiContainer, ...] = ()
    readiness_gates: tuple[ReadinessGate, ...] = ()


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
    is_ours = annotation.startswith(f"{agent_labels.DOMAIN}/")
    return is_ours or annotation in (MIRROR_ANNOTATION, networks.STATUS_ANNOTATION)

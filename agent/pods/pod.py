"""What is desired of a pod, and how it is read from a manifest."""

import ipaddress
import uuid
from typing import Any, Literal

import msgspec

from agent import labels as agent_labels
from agent.errors import PodgateError
from bpf.abi import IPAddress
from bpf.verdicts import Mode
from probes.spec.specs import PodSpec, parse_pod

# For manifests without a uid: the same namespace and name always give the same one.
_UID_SPACE = uuid.UUID("9b0f6c4e-6f2e-4c55-a7f5-0f3d5a1c7f0e")


SANDBOX_MISSING = "SandboxMissing"


class Problem(msgspec.Struct, frozen=True):
    """A problem of a manifest or label: a condition's reason and message. subject: "node",
    "namespace NAME", or empty for the pod."""

    reason: str
    message: str
    subject: str = ""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. With a problem in `manifest_problem`, the rest is the last good manifest's."""

    uid: str
    namespace: str
    name: str
    mode: Mode = Mode.OFF
    mode_problems: tuple[Problem, ...] = ()
    """Labels that are no mode, not allowed, or limited by the node's ceiling."""
    mode_origin: str = ""
    """What raised the mode above that of labels and default, in words, or empty."""
    host_problems: tuple[Problem, ...] = ()
    """Probes and hooks that send the kubelet to another address than the pod's."""
    annotation_problems: tuple[Problem, ...] = ()
    """Annotations without effect."""
    kept_up_to: Mode = Mode.OFF
    """Up to which mode an attached gate keeps its own, stricter one: while the labels of node and
    namespace are unknown, it may have been attached because of them. OFF: not at all."""
    netns_path: str | None = None
    host_network: bool = False
    is_relayed: bool = True
    """Whether the relay may proxy the kubelet's connections, in strict."""
    labels: dict[str, str] = {}
    spec: PodSpec = PodSpec()
    awaits_policies: bool = False
    """Whether it has the readiness gate `podgate.io/policy-ready`."""
    source: str = ""
    """The manifest's file name."""
    manifest: dict[str, Any] = {}
    """All of it, for clients of the pods API; empty for pods of other sources."""
    manifest_problem: Problem | None = None
    reported_addresses: tuple[IPAddress, ...] = ()
    """What the container runtime, or the manifest's status.podIPs, reports as the pod's own."""
    is_deleting: bool = False
    """Whether its containers are being stopped: the API server has its deletion timestamp, or does
    not have it any more."""
    has_spec: bool = True
    """False where only its sandbox is known: no source has its probes yet."""

    @property
    def is_described(self) -> bool:
        """Whether a source has described it; not a file that never was a pod's."""
        return bool(self.namespace)

    @property
    def full_name(self) -> str:
        """ "namespace/name"; for a file that never was a pod, the file's name."""
        return f"{self.namespace}/{self.name}" if self.is_described else self.name

    @property
    def has_no_sandbox(self) -> bool:
        """Whether the container runtime lists no sandbox of it."""
        problem = self.manifest_problem
        return problem is not None and problem.reason == SANDBOX_MISSING

    @property
    def probe_problem(self) -> Problem | None:
        """All mistakes of the pod's probes together, under the first one's reason."""
        if not self.spec.errors:
            return None
        return Problem(
            self.spec.errors[0].reason, " ".join(error.message for error in self.spec.errors)
        )


class PodError(PodgateError):
    """The manifest is not that of a pod that podgate can gate."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(reason, message)


class _Metadata(msgspec.Struct):
    name: str
    namespace: str = "default"
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _PodIp(msgspec.Struct):
    ip: str


class _Status(msgspec.Struct):
    podIPs: list[_PodIp] = []


class _Manifest(msgspec.Struct):
    kind: Literal["Pod"]
    metadata: _Metadata
    status: _Status | None = None
    apiVersion: Literal["v1"] = "v1"


def read_pod(document: object, *, source: str) -> Pod:
    """A pod from a decoded manifest, without its mode. Mistakes in probes are kept in
    `spec.errors`.

    Raises `PodError` with the reason `InvalidManifest`, or `NetnsMissing` for a pod that does not
    name its network namespace.
    """
    try:
        manifest = msgspec.convert(document, _Manifest)
    except msgspec.ValidationError as error:
        raise PodError(
            "InvalidManifest",
            f"{source} is not a pod manifest: {_unquoted(document) or _sentence(error)}.",
        ) from error
    assert isinstance(document, dict)  # it was converted
    metadata = manifest.metadata
    spec = parse_pod(document)
    netns_path = metadata.annotations.get(agent_labels.NETNS_ANNOTATION)
    if netns_path is None and not spec.host_network:
        raise PodError(
            "NetnsMissing",
            f"{source} names no network namespace; "
            f"add the annotation {agent_labels.NETNS_ANNOTATION} with its path.",
        )
    relay = metadata.annotations.get(agent_labels.RELAY_ANNOTATION)
    if relay not in (None, "off"):
        raise PodError(
            "InvalidManifest",
            f'annotation {agent_labels.RELAY_ANNOTATION}: unknown value {relay!r}; use "off" '
            "or remove the annotation.",
        )
    identity = f"{metadata.namespace}/{metadata.name}"
    return Pod(
        uid=metadata.uid or str(uuid.uuid5(_UID_SPACE, identity)),
        namespace=metadata.namespace,
        name=metadata.name,
        netns_path=netns_path,
        host_network=spec.host_network,
        is_relayed=relay is None,
        labels=metadata.labels,
        spec=spec,
        source=source,
        manifest=document,
        reported_addresses=_pod_ips(manifest.status, source),
    )


def _pod_ips(status: _Status | None, source: str) -> tuple[IPAddress, ...]:
    try:
        return tuple(ipaddress.ip_address(one.ip) for one in (status.podIPs if status else ()))
    except ValueError as error:
        raise PodError("InvalidManifest", f"{source}: status.podIPs: {error}.") from error


def _unquoted(document: object) -> str:
    """Which label or annotation YAML reads as something else than text, such as `mode: off`; empty
    if none. kubectl rejects it as well."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    for field in ("labels", "annotations"):
        values = metadata.get(field) if isinstance(metadata, dict) else None
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool | int | float):
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                return (
                    f"metadata.{field}: the value of {key} is {shown}, as YAML reads it without "
                    "quotation marks; put the text into them"
                )
    return ""


def _sentence(error: msgspec.ValidationError) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]

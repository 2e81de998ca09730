"""ConditionOwner documents: which processes of a node may report conditions of one domain.

The structs have the shape of the API's objects (deploy/chart/podgate/files/conditionowners.yaml).
The name of the object is the domain of its types, so each domain has one owner by construction.
"""

import re
from typing import Annotated, Literal

import msgspec

from agent import labels
from agent.errors import PodgateError
from agent.pods.conditions import FALSE, UNKNOWN

# RFC 1123 subdomain (k8s.io/apimachinery/pkg/util/validation), of two labels or more.
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+")
_MAX_DOMAIN = 253
# The part behind the slash of a qualified name (k8s.io/apimachinery/pkg/util/validation).
_NAME = r"^([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$"
_RESERVED = (labels.DOMAIN, "kubernetes.io", "k8s.io")
"""podgate's own, and those that Kubernetes reserves for itself, with all below them."""

KEEP = "Keep"
# As long as an agent of a node takes to be replaced by the next version.
_STALE_SECONDS = 30
# Each condition is in every copy of the pod; usual pods have five.
_PER_POD = 4
_PER_SECOND = 20


class OwnerError(PodgateError):
    """The document is not a valid ConditionOwner; the message names the field and the mistake."""


class PodsField(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """Pods of one service account."""

    namespace: Annotated[str, msgspec.Meta(min_length=1)]
    service_account: Annotated[str, msgspec.Meta(min_length=1)]


class ProcessField(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """Processes: all fields that are set must match.

    user: the user id on the node; systemd_unit: a service or scope that the node's own systemd
    started; cgroup: of version 2, and all below it.
    """

    user: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None
    systemd_unit: (
        Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9:_.\\@-]+\.(service|scope)$")] | None
    ) = None
    cgroup: Annotated[str, msgspec.Meta(pattern=r"^(/[^/]+)+$")] | None = None
    pods: PodsField | None = None


class LabelsField(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Labels that all are present; none match everything."""

    match_labels: Annotated[dict[str, str], msgspec.Meta(max_length=16)] = {}


class InjectField(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """New pods that get readiness gates. The API server adds them
    (deploy/chart/podgate/templates/owners-injection.yaml); agents only validate this."""

    types: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=63, pattern=_NAME)], ...],
        msgspec.Meta(min_length=1, max_length=4),
    ]
    pod_selector: LabelsField | None = None
    namespace_selector: LabelsField | None = None


class SpecField(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """reporters: any of them may report; stale_after_seconds: how long the owner may be gone;
    when_stale: the status of its conditions then; max_per_pod: conditions of one pod;
    changes_per_second: beyond which the owner is not read; inject: readiness gates of new pods."""

    reporters: Annotated[tuple[ProcessField, ...], msgspec.Meta(min_length=1, max_length=16)]
    stale_after_seconds: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = _STALE_SECONDS
    when_stale: Literal["Unknown", "False", "Keep"] = "Unknown"
    max_per_pod: Annotated[int, msgspec.Meta(ge=1, le=16)] = _PER_POD
    changes_per_second: Annotated[int, msgspec.Meta(ge=1, le=1000)] = _PER_SECOND
    inject: InjectField | None = None


class OwnerMetadata(msgspec.Struct, frozen=True):
    name: str


class ConditionOwner(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the API."""

    apiVersion: Literal["podgate.io/v1alpha1"] = labels.OWNER_API_VERSION
    kind: Literal["ConditionOwner"] = labels.OWNER_KIND
    metadata: OwnerMetadata
    spec: SpecField

    @property
    def domain(self) -> str:
        return self.metadata.name

    def stale_status(self, last: str) -> str:
        """The status of a condition whose owner is gone. last: what it reported last."""
        return {"Unknown": UNKNOWN, "False": FALSE}.get(self.spec.when_stale, last)


def domain_of(kind: str) -> str:
    """The domain of a condition's type; empty if it has none."""
    domain, separator, _ = kind.partition("/")
    return domain if separator else ""


def read(document: object) -> ConditionOwner:
    """Validate a document. Raises `OwnerError`."""
    try:
        owner = msgspec.convert(document, ConditionOwner)
    except msgspec.ValidationError as error:
        raise OwnerError(str(error)) from error
    domain = owner.domain
    if len(domain) > _MAX_DOMAIN or not _DOMAIN.fullmatch(domain):
        raise OwnerError(
            f"metadata.name {domain!r} is not the domain of condition types, such as "
            "gpu.example.com"
        )
    if any(domain == one or domain.endswith(f".{one}") for one in _RESERVED):
        raise OwnerError(
            f"metadata.name: the domain {domain} is reserved; use one of your organisation"
        )
    for number, one in enumerate(owner.spec.reporters):
        if one == ProcessField():
            raise OwnerError(
                f"spec.reporters[{number}]: set user, systemdUnit, cgroup or pods; any host "
                "process would match"
            )
    inject = owner.spec.inject
    if inject and not (inject.pod_selector or inject.namespace_selector):
        raise OwnerError(
            "spec.inject: set podSelector or namespaceSelector; podSelector: {} selects all pods"
        )
    return owner

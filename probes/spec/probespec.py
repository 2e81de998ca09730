"""podgate's probe spec: the annotation `podgate.io/probe-spec`, version 2 of a probe's fields.

The structs below and in probes/spec/handler_fields.py are the only definition: they validate the
annotation, and the published JSON Schema (docs/reference/probe-spec.schema.json) is generated from
them. Names are the API's wherever
the API has the field (KEP-4559: moving from `tcpSocket:` to `tcp:` is the whole migration).
"""

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from probes.errors import ProbeError
from probes.spec import definitions
from probes.spec.definitions import ContainerProbes, Handler, IpFamily, IpFamilyPolicy, Probe
from probes.spec.fields import FieldProblem, clipped
from probes.spec.handler_fields import FieldError, HandlerFields, StrictStruct
from probes.spec.handlers import HOST_REASON, KINDS, NAMES

ANNOTATION = "podgate.io/probe-spec"
API_VERSION = "podgate.io/v2"
REASON = "InvalidProbeSpec"

SIZE_MAX_BYTES = 256 * 1024
"""What the API allows for all annotations of an object together."""

PERIOD_MIN_MILLISECONDS = 100
"""Ten probes a second see an outage as soon as users do; more would only load the pod."""

_SECONDS_MAX = 2**31 - 1
_MILLISECONDS_MAX = 3_600_000

Seconds = Annotated[int, Meta(ge=1, le=_SECONDS_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=_MILLISECONDS_MAX)]
Threshold = Annotated[int, Meta(ge=1, le=_SECONDS_MAX)]
# As the kernel's dev_valid_name, without control characters.
InterfaceName = Annotated[str, Meta(pattern=r"^[!-.0-9;-~]{1,15}(?!\n)$")]
NetworkName = Annotated[str, Meta(pattern=r"^[-a-z0-9.]{1,253}(/[-a-z0-9.]{1,253})?(?!\n)$")]


class NetworkFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """A further interface of the pod: exactly one of its name and its network's."""

    interface: InterfaceName | UnsetType = UNSET
    network: NetworkName | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.interface is UNSET) == (self.network is UNSET):
            raise FieldError("", "needs one of interface and network")


if TYPE_CHECKING:
    _HandlerOfEachKind = StrictStruct
else:
    # A field for each kind of handler, by the kind's name.
    _HandlerOfEachKind = msgspec.defstruct(
        "_HandlerOfEachKind",
        [(kind.name, kind.fields | UnsetType, UNSET) for kind in KINDS.values() if kind.name],
        bases=(StrictStruct,),
        frozen=True,
        kw_only=True,
    )


class ProbeFields(_HandlerOfEachKind, frozen=True, kw_only=True, rename="camel"):
    """One probe: exactly one of the handlers, and how it is run."""

    initial_delay_seconds: Annotated[int, Meta(ge=0, le=_SECONDS_MAX)] = 0
    period_seconds: Seconds | UnsetType = UNSET
    period_milliseconds: (
        Annotated[int, Meta(ge=PERIOD_MIN_MILLISECONDS, le=_MILLISECONDS_MAX)] | UnsetType
    ) = UNSET
    timeout_seconds: Seconds | UnsetType = UNSET
    timeout_milliseconds: Milliseconds | UnsetType = UNSET
    success_threshold: Threshold = 1
    failure_threshold: Threshold = 3
    termination_grace_period_seconds: Seconds | UnsetType = UNSET
    ip_family: IpFamily | UnsetType = UNSET
    ip_family_policy: IpFamilyPolicy | UnsetType = UNSET
    target: Literal["pod", "localhost"] | NetworkFields = "pod"
    fail_when_listener_closes: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        given = [name for name in NAMES if getattr(self, name) is not UNSET]
        if not given:
            raise FieldError("", f"needs a handler: one of {', '.join(NAMES)}")
        if len(given) > 1:
            raise FieldError(given[-1], f"is a second handler in addition to {given[0]}: keep one")
        for name in ("period", "timeout"):
            if UNSET not in (
                getattr(self, f"{name}_seconds"),
                getattr(self, f"{name}_milliseconds"),
            ):
                raise FieldError(
                    f"{name}Milliseconds", f"is given in addition to {name}Seconds: keep one"
                )


_ONE_HANDLER = {
    "oneOf": [{"required": [name]} for name in NAMES],
    "not": {
        "anyOf": [
            {"required": [f"{name}Seconds", f"{name}Milliseconds"]}
            for name in ("period", "timeout")
        ]
    },
}
_ProbeField = Annotated[ProbeFields, Meta(extra_json_schema=_ONE_HANDLER)] | UnsetType


class ContainerFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """The probes that podgate runs for one container, in place of those of the pod's spec."""

    name: Annotated[str, Meta(min_length=1)]
    startup: _ProbeField = UNSET
    readiness: _ProbeField = UNSET
    liveness: _ProbeField = UNSET

    def __post_init__(self) -> None:
        for name, probe in (("startup", self.startup), ("liveness", self.liveness)):
            if probe is not UNSET and probe.success_threshold != 1:
                raise FieldError(f"{name}.successThreshold", "must be 1 here")
        readiness = self.readiness
        if readiness is not UNSET and readiness.termination_grace_period_seconds is not UNSET:
            field = "readiness.terminationGracePeriodSeconds"
            raise FieldError(field, "is not allowed on a readiness probe")


class ProbeSpec(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """The annotation's whole content."""

    api_version: Literal["podgate.io/v2"]
    containers: list[ContainerFields] = []  # noqa: RUF012


class ProbeSpecError(ProbeError):
    """The annotation cannot be used; `error` names the field."""

    def __init__(self, path: str, complaint: str) -> None:
        where = f"metadata.annotations[{ANNOTATION}]{'.' if path else ''}{path}"
        reason = HOST_REASON if path.rpartition(".")[2] == "host" else REASON
        if reason == HOST_REASON:
            complaint = "must be empty: a probe goes to its own pod only"
        self.error = FieldProblem(where, reason, f"{where} {complaint}.")
        super().__init__(self.error.message)


def is_annotation_error(error: FieldProblem) -> bool:
    """Whether this problem is in the annotation."""
    return error.path.startswith(f"metadata.annotations[{ANNOTATION}]")


def read(text: str, ports: Mapping[str, Mapping[str, int]]) -> dict[str, ContainerProbes]:
    """The probes of an annotation, by container.

    `ports` has the named ports of each container that can be probed. Raises ProbeSpecError for the
    first problem: half a spec is not what the author meant.
    """
    if len(text) > SIZE_MAX_BYTES:
        raise ProbeSpecError("", f"is longer than {SIZE_MAX_BYTES} bytes")
    spec = _decode(text)
    found: dict[str, ContainerProbes] = {}
    for index, container in enumerate(spec.containers):
        path = f"containers[{index}]"
        named = ports.get(container.name)
        if named is None:
            shown = clipped(container.name)
            raise ProbeSpecError(f"{path}.name", f"is {shown}, no container that can be probed")
        if container.name in found:
            raise ProbeSpecError(f"{path}.name", "is used twice")
        found[container.name] = ContainerProbes(
            name=container.name,
            startup=_probe(container.startup, f"{path}.startup", named),
            readiness=_probe(container.readiness, f"{path}.readiness", named),
            liveness=_probe(container.liveness, f"{path}.liveness", named),
        )
    return found


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the annotation's content."""
    made: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"The annotation {ANNOTATION}, {API_VERSION}",
    }
    made |= msgspec.json.schema(ProbeSpec)
    for definition in made["$defs"].values():
        # As Python 3.13 and later compile them.
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return made


_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `([^`]*)`$")


def _decode(text: str) -> ProbeSpec:
    try:
        return msgspec.json.decode(text.encode("utf-8", "replace"), type=ProbeSpec)
    except msgspec.ValidationError as error:
        raise _located(error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        complaint = str(error) or "nested too deep"
        raise ProbeSpecError("", f"is not JSON: {complaint[:200]}") from error


def _located(error: msgspec.ValidationError) -> ProbeSpecError:
    """msgspec's error as path and complaint."""
    text = str(error)
    at = _AT.search(text)
    path, complaint = (at[1], text[: at.start()]) if at else ("", text)
    field = ""
    if isinstance(error.__cause__, FieldError):
        field = error.__cause__.field
    elif match := _FIELD.match(complaint):
        field = match[2][:64]
        complaint = "is missing" if match[1] == "missing required" else "is not known here"
    else:
        complaint = f"is wrong: {complaint[:1].lower()}{complaint[1:]}".replace("`", "")
    return ProbeSpecError(".".join(part for part in (path, field) if part), complaint[:300])


def _probe(fields: ProbeFields | UnsetType, path: str, named: Mapping[str, int]) -> Probe | None:
    if fields is UNSET:
        return None
    grace = fields.termination_grace_period_seconds
    return Probe(
        handler=_handler(fields, path, named),
        initial_delay_seconds=float(fields.initial_delay_seconds),
        timeout_seconds=_seconds(fields.timeout_seconds, fields.timeout_milliseconds, 1.0),
        period_seconds=_seconds(fields.period_seconds, fields.period_milliseconds, 10.0),
        success_threshold=fields.success_threshold,
        failure_threshold=fields.failure_threshold,
        termination_grace_period_seconds=None if grace is UNSET else float(grace),
        ip_family=None if fields.ip_family is UNSET else fields.ip_family,
        ip_family_policy=None if fields.ip_family_policy is UNSET else fields.ip_family_policy,
        target=_target(fields.target),
        fail_when_listener_closes=fields.fail_when_listener_closes,
        answered=fields.answered,
    )


def _handler(fields: ProbeFields, path: str, named: Mapping[str, int]) -> Handler:
    (name,) = (name for name in NAMES if getattr(fields, name) is not UNSET)
    given: HandlerFields = getattr(fields, name)
    return given.handler(_port(given.port, f"{path}.{name}", named))


def _target(
    fields: Literal["pod", "localhost"] | NetworkFields,
) -> Literal["pod", "localhost"] | definitions.OtherNetwork:
    if not isinstance(fields, NetworkFields):
        return fields
    if fields.network is not UNSET:
        return definitions.OtherNetwork(network=fields.network)
    assert fields.interface is not UNSET
    return definitions.OtherNetwork(interface=fields.interface)


def _port(port: int | str, path: str, named: Mapping[str, int]) -> int:
    if isinstance(port, int):
        return port
    if port not in named:
        raise ProbeSpecError(f"{path}.port", f"names {clipped(port)}, no port of this container")
    return named[port]


def _seconds(seconds: int | UnsetType, milliseconds: int | UnsetType, default: float) -> float:
    if milliseconds is not UNSET:
        return milliseconds / 1000
    return default if seconds is UNSET else float(seconds)

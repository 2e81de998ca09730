"""HostAccessPolicy documents: the sources on the node that may start flows to pods.

The structs have the shape of the API's objects, whose schema is generated from them
(definition.py); `read` validates a document and returns a `Policy`. They contain no reference
cycles, so the garbage collector skips them (gc=False): with thousands of policies it would stop the
event loop for a tenth of a second.
"""

import datetime
import re
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from agent import labels
from agent.policy import kinds
from agent.policy.kinds import NamedPolicy, PolicyError, PolicyKind
from agent.policy.selectors import LabelSelector, PodSelector
from bpf import abi
from bpf.rules import MAX_PORT

# Each rule of all policies together has a hit counter.
MAX_POLICIES = abi.MAX_RULE_HITS // abi.GATE_RULES

# What the API accepts as a name (RFC 1123 subdomain, k8s.io/apimachinery/pkg/util/validation).
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_NAME = 253

# ICMP is one protocol for users and two for the kernel, one per family.
_ICMP, _ICMPV6 = 1, 58
PROTOCOLS = {"TCP": (6,), "UDP": (17,), "SCTP": (132,), "ICMP": (_ICMP, _ICMPV6)}
PROTOCOL_TEXTS = {6: "TCP", 17: "UDP", 132: "SCTP", _ICMP: "ICMP", _ICMPV6: "ICMPv6"}
# As `has_ports` in bpf/src/replies.h: TCP, UDP, DCCP, SCTP, UDP-Lite.
WITH_PORTS = {6, 17, 33, 132, 136}

# A port's name (IANA_SVC_NAME, k8s.io/apimachinery/pkg/util/validation): RFC 6335, section 5.1.
PORT_NAME = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
MAX_PORT_NAME = 15
# Units with a cgroup of their own; not -.slice, which is the root of all (systemd.unit(5)).
UNIT_NAME = r"[A-Za-z0-9:_.\\@-]*[A-Za-z0-9:_.\\@]\.(service|scope|slice)"
MAX_UNIT_NAME = 255

_Port = Annotated[int, msgspec.Meta(ge=1, le=MAX_PORT)]


class EmptyObject(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """`{}`: an alternative without parameters."""


class CgroupField(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A cgroup, by its path below the mount point of cgroup v2; subtree: and all below it."""

    path: str
    match: Literal["exact", "subtree"] = "exact"


class UnitField(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A unit of systemd, in whichever slice it is: sockets created in its cgroup and below."""

    name: str


class FromField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One source: exactly one of the fields."""

    any_process: EmptyObject | None = None
    kernel: EmptyObject | None = None
    cgroup: CgroupField | None = None
    systemd_unit: UnitField | None = None
    host_network_pods: PodSelector | None = None


class PortField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """As networking.k8s.io/v1 NetworkPolicyPort, with more protocols. One field is set.

    protocol: TCP (default), UDP, SCTP, ICMP (both families) or an IP protocol number; port: a
    number, or the name of a port of the pod's containers.
    """

    protocol: str | int | None = None
    port: _Port | str | None = None
    end_port: _Port | None = None


class SpecField(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
):
    pods: PodSelector
    from_: Annotated[tuple[FromField, ...], msgspec.Meta(min_length=1)] = msgspec.field(name="from")
    ports: Annotated[tuple[PortField, ...], msgspec.Meta(min_length=1)] | None = None
    node_selector: LabelSelector | None = None
    action: Literal["Allow", "Audit"] = "Allow"
    expires: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None


class PolicyMetadata(msgspec.Struct, frozen=True, gc=False):
    name: str


class HostAccessPolicy(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One object of the API. Empty lists are invalid: they could mean all or none."""

    apiVersion: Literal["policy.podgate.io/v1alpha1"] = labels.POLICY_API_VERSION
    kind: Literal["HostAccessPolicy"] = labels.POLICY_KIND
    metadata: PolicyMetadata
    spec: SpecField


class RuleSource(msgspec.Struct, frozen=True, gc=False, order=True):
    """The source that a rule admits.

    name: of "exact" and "subtree" the cgroup's normalised path, of "unit" the unit's name, of
    "pods" the text of their selector, by which `Policy.host_pods` has it.
    """

    kind: Literal["any", "kernel", "exact", "subtree", "unit", "pods"]
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "subtree":
                return f"{self.name} and below"
            case "unit":
                return f"unit {self.name}"
            case "pods":
                return f"hostNetwork pods {self.name}"
        return self.name or _SOURCE_TEXTS[self.kind]


SOURCES = "anyProcess, kernel, cgroup, systemdUnit and hostNetworkPods"
_SOURCE_TEXTS = {"any": "any process", "kernel": "the kernel"}


class PolicyRule(msgspec.Struct, frozen=True, gc=False, order=True):
    """One source and one range of ports, inclusive. protocol: IP protocol number, 0 for all.

    port_name: of the pod's port, instead of the range.
    """

    source: RuleSource
    protocol: int
    first_port: int
    last_port: int
    port_name: str = ""

    @property
    def protocol_text(self) -> str:
        return PROTOCOL_TEXTS.get(self.protocol, str(self.protocol)) if self.protocol else "any"

    @property
    def ports_text(self) -> str:
        if self.port_name:
            return self.port_name
        if (self.first_port, self.last_port) == (0, MAX_PORT):
            return "any"
        if self.first_port == self.last_port:
            return str(self.first_port)
        return f"{self.first_port}-{self.last_port}"


class Policy(NamedPolicy, frozen=True, gc=False, kw_only=True):
    """A HostAccessPolicy. rules: merged and sorted, at most as many as a gate holds; host_pods: the
    selectors of its sources, by `RuleSource.name`."""

    pods: PodSelector
    rules: tuple[PolicyRule, ...]
    document: HostAccessPolicy
    nodes: LabelSelector | None = None
    host_pods: dict[str, PodSelector] = msgspec.field(default_factory=dict)

    @property
    def is_staged(self) -> bool:
        """Whether it admits nothing, and only what it would admit is counted."""
        return self.document.spec.action == "Audit"

    @property
    def expires(self) -> float | None:
        """When it stops admitting anything, as Unix time; None: never."""
        expires = self.document.spec.expires
        return expires.timestamp() if expires else None

    @property
    def expires_text(self) -> str:
        """The same in RFC 3339; empty: never."""
        expires = self.document.spec.expires
        return time_text(expires) if expires else ""


def time_text(moment: datetime.datetime) -> str:
    """RFC 3339 in UTC and whole seconds."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(document: object) -> str | None:
    """The name of any document, also an invalid one; cut if very long."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name[:_MAX_NAME] if isinstance(name, str) else None


def read(document: object, *, source: str) -> Policy:
    """A policy from a decoded document. source: its origin, for messages.

    Raises `PolicyError`.
    """
    if not isinstance(document, dict) or document.get("kind") != labels.POLICY_KIND:
        raise PolicyError("not a HostAccessPolicy")
    return check(kinds.convert(document, HostAccessPolicy), source=source)


HOST_ACCESS = PolicyKind(
    labels.POLICY_KIND, labels.POLICY_PLURAL, lambda document, source: read(document, source=source)
)


def check(document: HostAccessPolicy, *, source: str) -> Policy:
    """Validate what types cannot express. Raises `PolicyError`."""
    check_name(document.metadata.name)
    return compiled(document, source=source)


def check_name(name: str) -> None:
    """Raises `PolicyError`."""
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise PolicyError(
            f"metadata.name: {name[:_MAX_NAME]!r} is not a valid name; use lower-case letters, "
            "digits, '-' and '.'"
        )


def compiled(document: HostAccessPolicy, *, source: str) -> Policy:
    """As `check`, whatever its name is. Raises `PolicyError`."""
    spec = document.spec
    _check("spec.pods", spec.pods)
    _check("spec.nodeSelector", spec.node_selector)
    sources = sorted({_source(f"spec.from[{i}]", field) for i, field in enumerate(spec.from_)})
    ranges = [(0, 0, MAX_PORT, "")]
    if spec.ports is not None:
        ranges = _merged(
            (protocol, *port_range(f"spec.ports[{index}]", port, protocol))
            for index, port in enumerate(spec.ports)
            for protocol in protocol_numbers(f"spec.ports[{index}]", port)
        )
    if len(sources) * len(ranges) > abi.GATE_RULES:
        raise PolicyError(
            f"spec: {len(sources)} sources times {len(ranges)} port ranges are more rules than the "
            f"{abi.GATE_RULES} that a gate holds; name fewer, or join ports into ranges"
        )
    host_pods = [field.host_network_pods for field in spec.from_ if field.host_network_pods]
    return Policy(
        name=document.metadata.name,
        source=source,
        pods=spec.pods,
        rules=tuple(PolicyRule(rule_source, *ports) for rule_source in sources for ports in ranges),
        document=document,
        nodes=spec.node_selector,
        host_pods={_text(selector): selector for selector in host_pods},
    )


def _check(where: str, selector: PodSelector | LabelSelector | None) -> None:
    if selector and (problem := selector.problem(where)):
        raise PolicyError(problem)


def _source(where: str, field: FromField) -> RuleSource:
    match [getattr(field, name) for name in field.__struct_fields__]:
        case [EmptyObject(), None, None, None, None]:
            return RuleSource("any")
        case [None, EmptyObject(), None, None, None]:
            return RuleSource("kernel")
        case [None, None, CgroupField(path, match), None, None]:
            return RuleSource(match, _normalised(f"{where}.cgroup.path", path))
        case [None, None, None, UnitField(name), None]:
            return unit_source(f"{where}.systemdUnit", name)
        case [None, None, None, None, PodSelector() as pods]:
            return pods_source(f"{where}.hostNetworkPods", pods)
    raise PolicyError(f"{where}: set exactly one of {SOURCES}")


def unit_source(where: str, name: str) -> RuleSource:
    """Raises `PolicyError`."""
    if len(name) > MAX_UNIT_NAME or not re.fullmatch(UNIT_NAME, name):
        raise PolicyError(
            f"{where}.name: {name[:MAX_UNIT_NAME]!r} is not the name of a "
            "service, scope or slice, such as name.service"
        )
    return RuleSource("unit", name)


def pods_source(where: str, pods: PodSelector) -> RuleSource:
    """Raises `PolicyError`."""
    _check(where, pods)
    return RuleSource("pods", _text(pods))


def _normalised(where: str, path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if not path.startswith("/") or {".", ".."} & set(parts) or "\0" in path:
        raise PolicyError(f"{where}: {path!r} is not a path such as /system.slice/name.service")
    return "/" + "/".join(parts)


def _text(selector: PodSelector) -> str:
    """The selector as JSON, in a fixed order."""
    return msgspec.json.encode(selector, order="deterministic").decode()


def protocol_numbers(where: str, field: PortField) -> tuple[int, ...]:
    """IP protocol numbers. Raises `PolicyError`."""
    protocol = field.protocol
    if protocol is None:
        if field == PortField():
            raise PolicyError(f"{where}: name protocol or port; without ports all are admitted")
        protocol = "TCP"
    if isinstance(protocol, int):
        if not 0 < protocol < 256:
            raise PolicyError(
                f"{where}.protocol: {protocol} is not an IP protocol number (1 to 255)"
            )
        return (protocol,)
    if protocol not in PROTOCOLS:
        names = ", ".join(PROTOCOLS)
        raise PolicyError(
            f"{where}.protocol: {protocol!r} is none of {names}, nor a number (1 to 255)"
        )
    return PROTOCOLS[protocol]


def port_range(where: str, field: PortField, protocol: int) -> tuple[int, int, str]:
    """The first and last port, or the name of one. Raises `PolicyError`."""
    if field.port is None:
        if field.end_port is not None:
            raise PolicyError(f"{where}.endPort: needs a port")
        return 0, MAX_PORT, ""
    if protocol not in WITH_PORTS:
        raise PolicyError(f"{where}.port: protocol {field.protocol} has no ports; leave it out")
    if isinstance(field.port, str):
        if len(field.port) > MAX_PORT_NAME or not re.fullmatch(PORT_NAME, field.port):
            raise PolicyError(f"{where}.port: {field.port[:99]!r} is neither a port nor its name")
        if field.end_port is not None:
            raise PolicyError(f"{where}.endPort: needs the number of a port, not its name")
        return 0, 0, field.port
    last = field.port if field.end_port is None else field.end_port
    if last < field.port:
        raise PolicyError(f"{where}.endPort: {last} is before port {field.port}")
    return field.port, last, ""


def _merged(ranges: Iterable[tuple[int, int, int, str]]) -> list[tuple[int, int, int, str]]:
    """Protocols with ranges or names of ports: sorted, adjacent ranges joined."""
    joined: list[tuple[int, int, int, str]] = []
    for protocol, first, last, name in sorted(set(ranges)):
        match joined:
            case [*_, (same, start, end, "")] if same == protocol and not name and first <= end + 1:
                joined[-1] = (protocol, start, max(last, end), "")
            case _:
                joined.append((protocol, first, last, name))
    return joined

"""Suggested policies, which would admit the sources that gates drop, or in audit would drop."""

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from agent.admin.observations import ObservedFlows
from agent.drops.merging import FlowKey, merge, pod_uid, source_key, target_key
from agent.drops.source_processes import NO_SOCKET
from agent.pods.lasting_labels import lasting_labels
from agent.policy import replay
from agent.policy.api_types import (
    CgroupField,
    EmptyObject,
    FromField,
    HostAccessPolicy,
    PolicyMetadata,
    PortField,
    SpecField,
    UnitField,
)
from agent.policy.selectors import LabelSelector, PodSelector
from bpf import abi

T = TypeVar("T")

_PROTOCOLS: dict[int, str | int] = {1: "ICMP", 58: "ICMP", 6: "TCP", 17: "UDP", 132: "SCTP"}
# With this many ports one source fits a gate, though ICMP counts as two rules.
_MAX_PORTS = abi.GATE_RULES // 2
# Within one of N parts of the observed time, all packets are one occasion: an hour of a day.
_PARTS = 24
_MAX_SLUG = 40
# By which workloads are named, in this order.
_NAME_LABELS = ("app.kubernetes.io/name", "app", "k8s-app", "name")
# systemd numbers these, so that the next one has another name (logind; systemd-run(1)).
_TRANSIENT_UNIT = re.compile(r"(session-.*|run-.*|.*-[0-9a-f]{16,})\.(scope|service)")


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy for one source and pods with the same labels, and the flows that it is made from.

    policy: None if none can admit them; doubt: why it must not be applied without a decision, in a
    phrase, or empty.
    """

    policy: HostAccessPolicy | None
    flows: tuple[ObservedFlows, ...]
    doubt: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """How a policy names a source. field: None if it cannot; doubt: as of `Suggestion`."""

    field: FromField | None
    doubt: str = ""


def suggest(flows: Iterable[ObservedFlows], observed: datetime.timedelta) -> list[Suggestion]:
    """Policies that admit these flows and no others, in order of namespaces and sources.

    Flows on one occasion, of a twenty-fourth of the observed time, are suggestions of their own,
    with a doubt. A policy selects by all labels that last, never by fewer.
    """
    groups: dict[tuple[FlowKey, FlowKey, str], list[ObservedFlows]] = {}
    for one in merge(flows):
        doubt = _doubt(one, observed)
        groups.setdefault((target_key(one), source_key(one), doubt), []).append(one)
    found = [
        suggestion
        for (_, _, doubt), members in groups.items()
        for suggestion in _suggestions(members, doubt)
    ]
    return sorted(found, key=_order)


def source_of(flows: ObservedFlows) -> Source:
    """The most lasting name of the source that is no wider than what was seen."""
    path, pod = flows.cgroup, flows.source_pod
    if path == NO_SOCKET:
        return Source(FromField(kernel=EmptyObject()))
    if not path.startswith("/"):
        return Source(None, "its cgroup was gone before it had a name")
    if pod and pod.host_network:
        labels = lasting_labels(pod.labels)
        selector = PodSelector((pod.namespace,), LabelSelector(labels) if labels else None)
        doubt = "" if labels else f"it selects all hostNetwork pods of namespace {pod.namespace}"
        return Source(FromField(host_network_pods=selector), doubt)
    cgroup = Source(FromField(cgroup=CgroupField(path)))
    if pod or pod_uid(path):
        why = "is not hostNetwork" if pod else "is not known"
        doubt = f"the cgroup is that of a pod that {why}, and ends with it"
        return dataclasses.replace(cgroup, doubt=doubt)
    if path == "/":
        return dataclasses.replace(
            cgroup,
            doubt="kernel threads and processes without a cgroup are in the root cgroup",
        )
    names = list(replay.units(path))
    if "user.slice" in names or _TRANSIENT_UNIT.fullmatch(path.rpartition("/")[2]):
        return dataclasses.replace(cgroup, doubt="a login or transient unit, which ends")
    if names and names[-1].endswith(replay.UNITS) and path.endswith(f"/{names[-1]}"):
        return Source(FromField(systemd_unit=UnitField(names[-1])))
    return cgroup


def _doubt(flows: ObservedFlows, observed: datetime.timedelta) -> str:
    if not flows.pod.namespace:
        return "podgate's relay is for the kubelet only"
    if flows.has_many_ports:
        return f"it has used more than {abi.CGROUP_SOURCES} ports, as a scan does"
    if doubt := source_of(flows).doubt:
        return doubt
    if not lasting_labels(flows.pod.labels):
        return f"the pod has no labels that last, so it selects all of {flows.pod.namespace}"
    if flows.last - flows.first <= observed / _PARTS:
        return "it was seen on one occasion only"
    return ""


def _suggestions(flows: Sequence[ObservedFlows], doubt: str) -> Iterable[Suggestion]:
    """For flows of one source to the same pods: several if the ports exceed a gate."""
    first = flows[0]
    source = source_of(first)
    if source.field is None or first.has_many_ports or not first.pod.namespace:
        yield Suggestion(None, tuple(flows), doubt)
        return
    labels = lasting_labels(first.pod.labels)
    pods = PodSelector((first.pod.namespace,), LabelSelector(labels) if labels else None)
    for ports in _chunks(_ports(flows), _MAX_PORTS):
        spec = SpecField(pods=pods, from_=(source.field,), ports=tuple(ports))
        members = tuple(one for one in flows if any(_covers(port, one) for port in ports))
        policy = HostAccessPolicy(metadata=PolicyMetadata(_name(first, spec)), spec=spec)
        yield Suggestion(policy, members, doubt)


def _name(flows: ObservedFlows, spec: SpecField) -> str:
    """Of another policy's content another name, so that applying one replaces no other."""
    source = flows.cgroup.rpartition("/")[2] or "root"
    if flows.source_pod:
        labels = lasting_labels(flows.source_pod.labels)
        source = next((labels[key] for key in _NAME_LABELS if key in labels), "pods")
    text = f"{source}-to-{flows.pod.namespace}"
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-_MAX_SLUG:].strip("-")
    content = msgspec.json.encode(spec, order="deterministic")
    return f"{slug}-{hashlib.blake2b(content, digest_size=4).hexdigest()}"


def _order(suggestion: Suggestion) -> tuple[bool, str, str, str]:
    first = suggestion.flows[0]
    name = suggestion.policy.metadata.name if suggestion.policy else ""
    return bool(suggestion.doubt), first.pod.namespace, name, first.cgroup


def _ports(flows: Iterable[ObservedFlows]) -> list[PortField]:
    """Ports, with adjacent ones joined into ranges."""
    ranges: list[tuple[str, int, int]] = []
    for protocol, port in sorted({(_protocol_text(one), one.port) for one in flows}):
        if port and ranges and ranges[-1][0] == protocol and ranges[-1][2] == port - 1:
            ranges[-1] = (protocol, ranges[-1][1], port)
        else:
            ranges.append((protocol, port, port))
    return [
        PortField(
            int(protocol) if protocol.isdecimal() else protocol,
            first or None,
            last if last > first else None,
        )
        for protocol, first, last in ranges
    ]


def _covers(field: PortField, flows: ObservedFlows) -> bool:
    if str(field.protocol) != _protocol_text(flows):
        return False
    first = field.port
    return not isinstance(first, int) or first <= flows.port <= (field.end_port or first)


def _protocol_text(flows: ObservedFlows) -> str:
    return str(_PROTOCOLS.get(flows.protocol, flows.protocol))


def _chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

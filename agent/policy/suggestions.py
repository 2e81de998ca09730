"""Suggested policies, which would admit the source processes that gates drop."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from agent import labels as agent_labels
from agent.admin.report import SourceProcessStatus
from agent.drops.source_processes import NO_SOCKET
from agent.policy.api_types import (
    CgroupField,
    EmptyObject,
    FromField,
    HostAccessPolicy,
    PolicyMetadata,
    PortField,
    SpecField,
)
from agent.policy.selectors import LabelSelector, PodSelector
from bpf import abi

T = TypeVar("T")

# Labels that controllers set on single pods or revisions, and that vanish with them.
_TRANSIENT_LABELS = {
    "pod-template-hash",
    "pod-template-generation",
    "controller-revision-hash",
    "controller-uid",
    "job-name",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "batch.kubernetes.io/job-completion-index",
}
# The cgroup of a pod: below it each start of a container creates another one
# (kubernetes/pkg/kubelet/cm/cgroup_manager_linux.go).
_POD = re.compile(r"(.*-)?pod[0-9a-f]{8}[-_0-9a-f]{24,}(\.slice)?")
_PROTOCOLS: dict[str, str | int] = {
    "tcp": "TCP",
    "udp": "UDP",
    "sctp": "SCTP",
    "icmp": "ICMP",
    "gre": 47,
    "esp": 50,
}
# With this many ports one source fits a gate, though ICMP counts as two rules.
_MAX_PORTS = abi.GATE_RULES // 2

_Pods = tuple[str, tuple[tuple[str, str], ...]]
_PortUse = tuple[str, int]


def suggest(
    found: Iterable[SourceProcessStatus],
) -> tuple[list[HostAccessPolicy], list[SourceProcessStatus]]:
    """Policies that admit these sources to these ports of these pods, and no others; and those
    sources whose cgroup no longer exists.

    Pods are selected by namespace and permanent labels; without such labels, by namespace alone.
    """
    used: dict[_Pods, dict[FromField, set[_PortUse]]] = defaultdict(lambda: defaultdict(set))
    nameless = []
    for process in found:
        if not process.namespace:
            continue  # the relay: no other source has a reason to reach it
        if process.has_many_ports:
            continue  # a scan: a policy for it would admit every port
        if source := _source(process.cgroup):
            used[_pods(process)][source].add((process.protocol, process.port))
        else:
            nameless.append(process)
    policies: list[HostAccessPolicy] = []
    numbers: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
    for pods, by_source in sorted(used.items()):
        namespace, labels = pods
        selector = PodSelector((namespace,), LabelSelector(dict(labels)))
        for sources, ports in _merge_equal(by_source):
            prefix = re.sub(r"[^a-z0-9]+", "-", namespace.lower()).strip("-") or "pods"
            metadata = PolicyMetadata(f"suggested-{prefix}-{next(numbers[prefix])}")
            spec = SpecField(pods=selector, from_=sources, ports=ports)
            policies.append(HostAccessPolicy(metadata=metadata, spec=spec))
    return policies, nameless


def _source(path: str) -> FromField | None:
    if path == NO_SOCKET:
        return FromField(kernel=EmptyObject())
    if not path.startswith("/"):
        return None
    parts = path.split("/")
    for index, part in enumerate(parts):
        if _POD.fullmatch(part):
            return FromField(cgroup=CgroupField("/".join(parts[: index + 1]), "subtree"))
    return FromField(cgroup=CgroupField(path))


def _pods(process: SourceProcessStatus) -> _Pods:
    lasting = {
        key: value
        for key, value in process.labels.items()
        if key not in _TRANSIENT_LABELS and not key.startswith(f"{agent_labels.DOMAIN}/")
    }
    return process.namespace, tuple(sorted(lasting.items()))


def _merge_equal(
    by_source: dict[FromField, set[_PortUse]],
) -> Iterable[tuple[tuple[FromField, ...], tuple[PortField, ...]]]:
    """Sources with equal ports, in groups that fit one policy."""
    sources_of: dict[tuple[PortField, ...], list[FromField]] = defaultdict(list)
    for source, used in by_source.items():
        sources_of[_ports(used)].append(source)
    for ports, sources in sources_of.items():
        for some_ports in _chunks(ports, _MAX_PORTS):
            rules = sum(2 if port.protocol == "ICMP" else 1 for port in some_ports)
            for some_sources in _chunks(sorted(sources, key=repr), abi.GATE_RULES // rules):
                yield tuple(some_sources), tuple(some_ports)


def _ports(used: set[_PortUse]) -> tuple[PortField, ...]:
    """Ports, with adjacent ones joined into ranges."""
    ranges: list[tuple[str, int, int]] = []
    for protocol, port in sorted(used):
        if port and ranges and ranges[-1][0] == protocol and ranges[-1][2] == port - 1:
            ranges[-1] = (protocol, ranges[-1][1], port)
        else:
            ranges.append((protocol, port, port))
    return tuple(
        PortField(
            _PROTOCOLS.get(protocol) or int(protocol),
            first or None,
            last if last > first else None,
        )
        for protocol, first, last in ranges
    )


def _chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

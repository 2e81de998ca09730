"""Policies that would let in whom the gates refuse: from the aggregate of callers."""

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

# What controllers put on single pods or single revisions: gone with them.
_PASSING_LABELS = {
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
# The cgroup of a pod: below it each start of a container makes another one
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
# So many that one sender more still fits a gate, though ICMP is two rules there.
_MAX_PORTS = abi.GATE_RULES // 2

_Pods = tuple[str, tuple[tuple[str, str], ...]]
_PortUse = tuple[str, int]


def suggest(
    callers: Iterable[SourceProcessStatus],
) -> tuple[list[HostAccessPolicy], list[SourceProcessStatus]]:
    """Policies that let in these callers and, of those pods, no other sender to no other port; and
    the callers that cannot be named any more.

    Pods are selected by namespace and lasting labels: where there are none, by namespace alone.
    """
    asked: dict[_Pods, dict[FromField, set[_PortUse]]] = defaultdict(lambda: defaultdict(set))
    nameless = []
    for caller in callers:
        if not caller.namespace:
            continue  # the relay, whom nobody else has any business with
        if sender := _source(caller.cgroup):
            asked[_pods(caller)][sender].add((caller.protocol, caller.port))
        else:
            nameless.append(caller)
    policies: list[HostAccessPolicy] = []
    numbers: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
    for pods, by_sender in sorted(asked.items()):
        namespace, labels = pods
        selector = PodSelector((namespace,), LabelSelector(dict(labels)))
        for senders, ports in _merge_equal(by_sender):
            prefix = re.sub(r"[^a-z0-9]+", "-", namespace.lower()).strip("-") or "pods"
            metadata = PolicyMetadata(f"suggested-{prefix}-{next(numbers[prefix])}")
            spec = SpecField(pods=selector, from_=senders, ports=ports)
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


def _pods(caller: SourceProcessStatus) -> _Pods:
    lasting = {
        key: value
        for key, value in caller.labels.items()
        if key not in _PASSING_LABELS and not key.startswith(f"{agent_labels.DOMAIN}/")
    }
    return caller.namespace, tuple(sorted(lasting.items()))


def _merge_equal(
    by_sender: dict[FromField, set[_PortUse]],
) -> Iterable[tuple[tuple[FromField, ...], tuple[PortField, ...]]]:
    """Senders that asked for the same, with what they asked for, as much as one policy may hold."""
    sources_of: dict[tuple[PortField, ...], list[FromField]] = defaultdict(list)
    for sender, asked in by_sender.items():
        sources_of[_ports(asked)].append(sender)
    for ports, senders in sources_of.items():
        for some_ports in _chunks(ports, _MAX_PORTS):
            rules = sum(2 if port.protocol == "ICMP" else 1 for port in some_ports)
            for some_senders in _chunks(sorted(senders, key=repr), abi.GATE_RULES // rules):
                yield tuple(some_senders), tuple(some_ports)


def _ports(asked: set[_PortUse]) -> tuple[PortField, ...]:
    """Ports that follow each other as one range."""
    ranges: list[tuple[str, int, int]] = []
    for protocol, port in sorted(asked):
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

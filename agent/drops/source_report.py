"""The report of drop sources, with or without an agent; a scan of ports is one line of it."""

import collections
from collections.abc import Iterable, Sequence

import msgspec

from agent.admin.report import SourceProcessStatus
from agent.drops.source_processes import CgroupName, protocol_word, wall_clock
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode, Verdict

SCANNED_PORTS = 16
"""A source that uses this number of ports of a pod scans it. Pods declare fewer, and one scan of
hundreds hides all other sources."""


def source_status(
    seen: DropSource,
    cgroup: CgroupName,
    *,
    namespace: str,
    pod: str,
    labels: dict[str, str],
    is_admitted: bool,
) -> SourceProcessStatus:
    """namespace, pod, labels: of the pod; is_admitted: whether a rule admits the source by now."""
    verdict = Verdict.WOULD_DROP if seen.mode is Mode.AUDIT else Verdict.DROP
    return SourceProcessStatus(
        namespace=namespace,
        pod=pod,
        mode=seen.mode.label,
        verdict=verdict.label,
        protocol=protocol_word(seen.protocol),
        port=seen.port,
        has_many_ports=seen.has_many_ports,
        cgroup=cgroup.path,
        cgroup_id=seen.cgroup,
        ifindex=seen.ifindex,
        source_pod=cgroup.pod_name,
        process=seen.process_name,
        packets=seen.count,
        first=wall_clock(seen.first_ns),
        last=wall_clock(seen.last_ns),
        labels=labels,
        is_admitted=is_admitted,
    )


def with_scans(sources: Iterable[SourceProcessStatus]) -> list[SourceProcessStatus]:
    """The busiest first, of equal ones the newest. Ports of a pod that one source scans are one."""
    by_source: dict[tuple[object, ...], list[SourceProcessStatus]] = collections.defaultdict(list)
    for one in sources:
        key = one.cgroup_id, one.ifindex, one.protocol, one.mode
        by_source[key].append(one)
    found: list[SourceProcessStatus] = []
    for each in by_source.values():
        found += [_scan(each)] if len(each) >= SCANNED_PORTS else each
    return sorted(found, key=lambda one: (one.packets, one.last), reverse=True)


def _scan(sources: Sequence[SourceProcessStatus]) -> SourceProcessStatus:
    ports = [one.port for one in sources if not one.has_many_ports]
    first = min(sources, key=lambda one: one.first)
    return msgspec.structs.replace(
        first,
        port=0,
        has_many_ports=True,
        port_count=len(ports) if len(ports) == len(sources) else 0,
        lowest_port=min(ports),
        highest_port=max(ports),
        packets=sum(one.packets for one in sources),
        last=max(one.last for one in sources),
        is_admitted=all(one.is_admitted for one in sources),
    )

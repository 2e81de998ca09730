"""What the admin socket tells, made of what the agent's parts know."""

from collections.abc import Callable, Iterable, Mapping

from agent.admin.report import (
    CallerStatus,
    CarriedStatus,
    Drops,
    GateStatus,
    PathStatus,
    PodStatus,
    ProbeStatus,
    RelayStatus,
)
from agent.drops.source_processes import protocol_word, wall_clock
from agent.pods.conditions import Condition
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import Relaying
from bpf.drop_sources import DropSource
from bpf.gates import Counts
from bpf.verdicts import Mode

RELAY = Pod(uid="relay", namespace="", name="relay", mode=Mode.ENFORCE)
"""Stands for a pod where an interface is the relay's."""


def pod_status(
    guarded: PodState,
    counts: dict[int, Counts],
    *,
    conditions: list[Condition],
    paths: list[PathStatus],
    older_flows: int,
    probes: list[ProbeStatus],
    carried: list[CarriedStatus],
) -> PodStatus:
    """One pod; counts: of all gates, by ifindex."""
    pod = guarded.pod
    return PodStatus(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        mode=pod.mode.label,
        source=pod.source,
        netns=pod.netns_path,
        addresses=list(guarded.own_addresses),
        unconfirmed={str(address): why for address, why in guarded.claims.unconfirmed.items()},
        conditions=conditions,
        gates=_gates({i: interface.name for i, interface in guarded.gates.items()}, counts),
        paths=paths,
        older_flows=older_flows,
        probes=probes,
        carried=carried,
    )


def relay_status(
    relaying: Relaying,
    connections: ConnectionStats,
    interfaces: Mapping[int, str],
    counts: Mapping[int, Counts],
) -> RelayStatus:
    """interfaces: the relays' own on the node."""
    reports = relaying.last_reports
    return RelayStatus(
        is_up=relaying.is_up,
        problem=relaying.trouble,
        restarts=relaying.restarts,
        open=sum(report.connections for report in reports),
        held=sum(report.held_syns for report in reports),
        is_direct=any(report.is_full for report in reports),
        unknown=connections.unknown_address,
        gates=_gates(interfaces, counts),
    )


def drops_of(
    callers: Iterable[tuple[DropSource, str]],
    pod_of: Callable[[int], Pod | None],
    *,
    lost_packets: int,
) -> Drops:
    """callers: with the paths of their cgroups; pod_of: the pod behind an interface."""
    return Drops(
        callers=[
            CallerStatus(
                namespace=pod.namespace,
                pod=pod.name,
                mode=pod.mode.label,
                protocol=protocol_word(seen.protocol),
                port=seen.port,
                sender=sender,
                process=seen.process_name,
                packets=seen.count,
                first=wall_clock(seen.first_ns),
                last=wall_clock(seen.last_ns),
                labels=pod.labels,
            )
            for seen, sender in callers
            if (pod := pod_of(seen.ifindex))
        ],
        lost_packets=lost_packets,
    )


def _gates(interfaces: Mapping[int, str], counts: Mapping[int, Counts]) -> list[GateStatus]:
    return [
        GateStatus(interface=name, ifindex=ifindex, packets=_words(counts.get(ifindex, {})))
        for ifindex, name in interfaces.items()
    ]


def _words(counts: Counts) -> dict[str, dict[str, int]]:
    """Counts as nested words: {"drop": {"node": 2}}."""
    words: dict[str, dict[str, int]] = {}
    for (verdict, reason), count in sorted(counts.items()):
        words.setdefault(verdict.label, {})[reason.label] = count
    return words

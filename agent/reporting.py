"""What the admin socket tells, made of what the agent's parts know."""

from collections.abc import Callable, Iterable

from agent.callers import protocol_word, wall_clock
from agent.conditions import Condition
from agent.guarding import Guarded
from agent.pods import Pod
from agent.status import CallerStatus, Drops, GateStatus, PathStatus, PodStatus, ProbeStatus
from bpf.callers import Seen
from bpf.gates import Counts


def pod_status(
    guarded: Guarded,
    counts: dict[int, Counts],
    *,
    conditions: list[Condition],
    paths: list[PathStatus],
    older_flows: int,
    probes: list[ProbeStatus],
) -> PodStatus:
    """One pod; counts: of all gates, by ifindex."""
    pod = guarded.pod
    return PodStatus(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        mode=pod.mode.word,
        source=pod.source,
        netns=pod.netns_path,
        addresses=list(guarded.network.probe_addresses) if guarded.network else [],
        conditions=conditions,
        gates=[
            GateStatus(
                interface=interface.name,
                ifindex=ifindex,
                packets=_words(counts.get(ifindex, {})),
            )
            for ifindex, interface in guarded.gates.items()
        ],
        paths=paths,
        older_flows=older_flows,
        probes=probes,
    )


def drops_of(
    callers: Iterable[tuple[Seen, str]],
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
                mode=pod.mode.word,
                protocol=protocol_word(seen.protocol),
                port=seen.port,
                sender=sender,
                process=seen.name,
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


def _words(counts: Counts) -> dict[str, dict[str, int]]:
    """Counts as nested words: {"drop": {"node": 2}}."""
    words: dict[str, dict[str, int]] = {}
    for (verdict, reason), count in sorted(counts.items()):
        words.setdefault(verdict.word, {})[reason.word] = count
    return words

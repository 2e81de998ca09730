"""Output of `podgate status` without an agent."""

import datetime
from collections.abc import Iterator

from agent.operate.cli.output import Column, Screen, Signal, signal_of_mode
from agent.operate.cli.views import findings as findings_view
from agent.operate.pinned.findings import pod_name
from agent.operate.pinned.report import PinnedGateStatus, PinnedStatus
from agent.operate.text import duration
from bpf.verdicts import Verdict


def _name(gate: PinnedGateStatus) -> str:
    return pod_name(gate) or f"interface {gate.interface}"


def _count(gate: PinnedGateStatus, verdict: Verdict) -> int:
    return sum(gate.packets.get(verdict.label, {}).values())


GATES: tuple[Column[PinnedGateStatus], ...] = (
    Column("POD", _name),
    Column("MODE", lambda gate: gate.mode, signal=lambda gate: signal_of_mode(gate.mode)),
    Column(
        "ATTACHED",
        lambda gate: gate.attachment or "no",
        signal=lambda gate: Signal.SAFE if gate.attachment else Signal.DANGER,
    ),
    Column("RULES", lambda gate: gate.rules),
    Column("DROPPED", lambda gate: _count(gate, Verdict.DROP)),
    Column("WOULD DROP", lambda gate: _count(gate, Verdict.WOULD_DROP)),
    Column("KUBELET", lambda gate: "declared ports" if gate.declared_ports else "", is_wide=True),
    Column("GATE", lambda gate: gate.interface, is_wide=True),
    Column("ADDRESSES", lambda gate: gate.addresses, is_wide=True, is_below=True),
)


def show(screen: Screen, status: PinnedStatus) -> None:
    """Print the findings, then what is in force."""
    findings_view.show(screen, status.findings, by="podgate status", with_advice=screen.is_wide)
    for line in _head(status):
        screen.line(line)
    screen.line()
    if status.gates:
        screen.table(GATES, status.gates)
    else:
        screen.line("No pod has a gate.")


def _head(status: PinnedStatus) -> Iterator[str]:
    if status.heartbeat_age_seconds is None:
        yield "agent: none has run since these objects were made"
    else:
        age = duration(datetime.timedelta(seconds=status.heartbeat_age_seconds))
        yield f"agent: its last heartbeat was {age} ago"
    if status.kubelet:
        restarts = "" if status.is_kubelet_followed else "; its restarts are not followed"
        yield f"kubelet: {status.kubelet}{restarts}"
    if status.relay.ports:
        state = "serves" if status.relay.is_up else "does not serve"
        yield f"relay: {state}; ports of pods: {status.relay.ports}"
    if status.node_drops:
        counts = [f"{count} by {reason}" for reason, count in sorted(status.node_drops.items())]
        yield f"packets dropped before an interface is chosen: {', '.join(counts)}"

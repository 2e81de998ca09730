"""Output of `podgate status` without the agent."""

from collections.abc import Iterator

from agent.cli.output import Column, Screen, Signal, full_name, signal_of_mode
from agent.pinned.exposures import in_words
from agent.pinned.report import PinnedGateStatus, PinnedStatus
from bpf.verdicts import Verdict

_NOT_ATTACHED = "not attached"


def _count(gate: PinnedGateStatus, verdict: Verdict) -> int:
    return sum(gate.packets.get(verdict.label, {}).values())


def _reasons(gate: PinnedGateStatus) -> list[str]:
    dropped = gate.packets.get(Verdict.DROP.label, {})
    return [f"{reason}: {count}" for reason, count in sorted(dropped.items())]


GATES: tuple[Column[PinnedGateStatus], ...] = (
    Column("POD", lambda gate: full_name(gate.namespace, gate.pod) or "(no name saved)"),
    Column("INTERFACE", lambda gate: gate.interface),
    Column("MODE", lambda gate: gate.mode, signal=lambda gate: signal_of_mode(gate.mode)),
    Column(
        "GATE",
        lambda gate: gate.attachment or _NOT_ATTACHED,
        signal=lambda gate: None if gate.attachment else Signal.DANGER,
    ),
    Column("DROPPED", lambda gate: _count(gate, Verdict.DROP)),
    Column("WOULD DROP", lambda gate: _count(gate, Verdict.WOULD_DROP)),
    Column("RULES", lambda gate: gate.rules, is_wide=True),
    Column("DROP REASONS", _reasons, is_wide=True, is_below=True),
    Column("ADDRESSES", lambda gate: gate.addresses, is_wide=True, is_below=True),
)


def show(screen: Screen, status: PinnedStatus) -> None:
    """Print what is open first, then the node and its gates."""
    for signal, text in problems(status):
        screen.line(text, signal)
    for line in _head(status):
        screen.line(line)
    screen.line()
    if status.gates:
        screen.table(GATES, status.gates)
    else:
        screen.line("No gates.")


def problems(status: PinnedStatus) -> list[tuple[Signal, str]]:
    """The dangerous ones first."""
    found = [
        (Signal.DANGER if each.is_open else Signal.CAUTION, each.text) for each in status.exposures
    ]
    if missing := [gate.interface for gate in status.gates if not gate.attachment]:
        text = f"No program is attached to {', '.join(missing)}: all host processes reach the pod."
        found.append((Signal.DANGER, text))
    found += [
        (Signal.CAUTION, f"{hook.name} is not attached: {hook.problem}; gates still drop.")
        for hook in status.hooks
        if hook.problem
    ]
    return sorted(found, key=lambda problem: problem[0] is not Signal.DANGER)


def _head(status: PinnedStatus) -> Iterator[str]:
    age = status.heartbeat_age_seconds
    beat = "no heartbeat yet" if age is None else f"last heartbeat {in_words(age)} ago"
    kubelet = f"kubelet in {status.kubelet}" if status.kubelet else "kubelet not identified"
    followed = "followed" if status.is_kubelet_followed else "not followed"
    yield f"{beat}; {kubelet}, {followed} by the kernel; schema {status.schema}"
    if status.relay.is_up:
        yield f"relay serves {status.relay.ports} ports"
    if status.node_drops:
        counts = ", ".join(f"{name}: {n}" for name, n in sorted(status.node_drops.items()))
        yield f"dropped before an interface is chosen: {counts}"

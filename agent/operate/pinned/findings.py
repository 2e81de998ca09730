"""What is wrong on a node whose agent does not respond: findings, by the pins."""

import pathlib
from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding, found, ordered
from agent.admin.findings import gate_detached, of_hooks, off, relay_missing
from agent.operate.pinned import exposures
from agent.operate.pinned.report import Exposure, PinnedGateStatus, PinnedStatus
from agent.pods import off_marks
from bpf import pins

# By what opens, and whether it is open already.
_EXPOSURES = {
    (exposures.DECLARED_PORTS, True): kinds.DECLARED_PORTS_OPEN,
    (exposures.DECLARED_PORTS, False): kinds.PORTS_OPEN_SOON,
    (exposures.ALL, True): kinds.GATES_OPEN,
    (exposures.ALL, False): kinds.GATES_OPEN_SOON,
}


def find(status: PinnedStatus) -> list[Finding]:
    """All findings, the worst first."""
    return ordered([agent_finding(status), *_of_pins(status)])


def without_pins(
    installation: pins.Pins, run_directory: pathlib.Path, unreachable: str
) -> list[Finding]:
    """Where the pins cannot be read. unreachable: why the agent does not respond."""
    missing = found(kinds.AGENT_MISSING, unreachable)
    is_off = off_marks.are_set(run_directory, installation)
    return ordered([missing, *_of_off(is_off=is_off)])


def _of_off(*, is_off: bool) -> Iterator[Finding]:
    if is_off:
        yield off("'podgate off --node'")


def agent_finding(status: PinnedStatus) -> Finding:
    """Of the agent itself."""
    open_ones = {exposure.what for exposure in status.exposures if exposure.is_open}
    in_force = sum(bool(gate.attachment) for gate in status.gates)
    if not status.gates:
        return found(kinds.AGENT_MISSING, "No agent responds, and no gate is in force")
    if exposures.ALL in open_ones:
        in_force = 0
    age = status.heartbeat_age_seconds
    beat = "never written" if age is None else f"{exposures.in_words(age)} old"
    text = f"No agent responds, and {_gates(in_force)} in force, heartbeat {beat}"
    return found(kinds.AGENT_DEAD, text)


def pod_name(gate: PinnedGateStatus) -> str:
    """ "namespace/name"; empty if it is not known."""
    return f"{gate.namespace}/{gate.pod}" if gate.pod else ""


def _of_pins(status: PinnedStatus) -> Iterator[Finding]:
    yield from _of_off(is_off=status.is_off)
    for exposure in status.exposures:
        yield _of_exposure(exposure)
    if status.kubelet is None and not _has_open_ports(status):
        yield found(kinds.KUBELET_UNKNOWN, "Kubelet not identified")
    for gate in status.gates:
        if not gate.attachment:
            yield gate_detached(gate.interface, pod_name(gate))
    yield from of_hooks(status.hooks)
    if not status.relay.is_up and any(gate.mode == "strict" for gate in status.gates):
        yield relay_missing("no relay serves", has_fallback=status.relay.has_fallback)


def _of_exposure(exposure: Exposure) -> Finding:
    kind = _EXPOSURES[exposure.what, exposure.is_open]
    return found(kind, exposure.text, remedy="Start the agent.")


def _has_open_ports(status: PinnedStatus) -> bool:
    return any(
        exposure.what == exposures.DECLARED_PORTS and exposure.is_open
        for exposure in status.exposures
    )


def _gates(number: int) -> str:
    return "1 gate is" if number == 1 else f"{number} gates are"

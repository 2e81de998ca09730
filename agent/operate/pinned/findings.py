"""What is wrong on a node whose agent does not respond: findings, by the pins."""

import pathlib
from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding, found, ordered
from agent.admin.findings import gate_detached, of_hooks, off, relay_missing
from agent.operate.pinned import agent_process, exposures
from agent.operate.pinned.report import Exposure, PinnedGateStatus, PinnedStatus
from agent.pods import off_marks
from bpf import pins

# An agent that has started publishes its reports within this time, also on a busy node.
_START_SECONDS = 60.0
# It beats once a second, and was given five seconds to answer.
_BEAT_SECONDS = 3.0

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
    process = agent_process.find(installation.root)
    missing = found(kinds.AGENT_MISSING, unreachable)
    if process and process.age_seconds < _START_SECONDS:
        missing = found(kinds.AGENT_STARTING, "The agent starts and does not answer yet")
    is_off = off_marks.are_set(run_directory, installation)
    return ordered([missing, *_of_off(is_off=is_off)])


def _of_off(*, is_off: bool) -> Iterator[Finding]:
    if is_off:
        yield off("'podgate off --node'")


def agent_finding(status: PinnedStatus) -> Finding:
    """Of the agent itself: that none runs, or that it starts, hangs, or only fails to answer."""
    gates = _in_force(status)
    if status.agent_pid:
        return _of_process(status, gates)
    if not status.gates:
        return found(kinds.AGENT_MISSING, f"No agent responds, and {gates}")
    age = status.heartbeat_age_seconds
    beat = "never written" if age is None else f"{exposures.in_words(age)} old"
    return found(kinds.AGENT_DEAD, f"No agent responds, and {gates}, heartbeat {beat}")


def _of_process(status: PinnedStatus, gates: str) -> Finding:
    age, beat = status.agent_age_seconds, status.heartbeat_age_seconds
    has_beaten = beat is not None and beat < age
    is_late = beat is None or beat > _BEAT_SECONDS
    if age < _START_SECONDS and not (has_beaten and is_late):
        return found(kinds.AGENT_STARTING, f"The agent starts and does not answer yet, and {gates}")
    if is_late:
        text = f"The agent hangs (pid {status.agent_pid} has no heartbeat), and {gates}"
        return found(kinds.AGENT_HUNG, text)
    return found(kinds.AGENT_UNREADABLE, status.agent or "The agent runs and does not answer")


def _in_force(status: PinnedStatus) -> str:
    open_ones = {exposure.what for exposure in status.exposures if exposure.is_open}
    number = sum(bool(gate.attachment) for gate in status.gates)
    if exposures.ALL in open_ones:
        number = 0
    if not status.gates:
        return "no gate is in force"
    return "1 gate is in force" if number == 1 else f"{number} gates are in force"


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

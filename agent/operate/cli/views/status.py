"""Output of `podgate status`."""

from collections.abc import Iterator

from agent import labels
from agent.admin import findings
from agent.admin.report import AgentReport, PodStatus, RelayStatus
from agent.listing import full_name
from agent.operate.cli.output import (
    Cell,
    Column,
    Screen,
    Signal,
    signal_of_mode,
    signal_of_severity,
    time_text,
)
from agent.operate.cli.views import findings as findings_view
from agent.pods.conditions import TRUE, Condition
from agent.pods.isolation import ENFORCED, STRICT
from bpf.verdicts import Verdict

_BYPASSED = "bypassed"


def _condition(pod: PodStatus, kind: str) -> Condition | None:
    return next((found for found in pod.conditions if found.type == kind), None)


def _isolation_signal(pod: PodStatus) -> Signal | None:
    condition = _condition(pod, labels.ISOLATION_READY)
    if condition is None:
        return None
    if kind := findings.kind_of(condition, pod.mode):
        return signal_of_severity(kind.severity) or Signal.CAUTION
    return Signal.SAFE if condition.reason in (ENFORCED, STRICT) else Signal.CAUTION


def _probes_signal(pod: PodStatus) -> Signal | None:
    condition = _condition(pod, labels.PROBES_PASSING)
    if condition is None:
        return None
    return Signal.SAFE if condition.status == TRUE else Signal.CAUTION


def _reason(pod: PodStatus, kind: str) -> str:
    condition = _condition(pod, kind)
    return condition.reason if condition else ""


def _count(pod: PodStatus, verdict: Verdict) -> int:
    return sum(sum(gate.packets.get(verdict.label, {}).values()) for gate in pod.gates)


def _by_reason(pod: PodStatus) -> Cell:
    """Packets that are dropped, and those that would be, as "node ×7"."""
    totals: dict[str, int] = {}
    for gate in pod.gates:
        for verdict in (Verdict.DROP, Verdict.WOULD_DROP):
            for reason, count in gate.packets.get(verdict.label, {}).items():
                totals[reason] = totals.get(reason, 0) + count
    return [f"{reason} ×{count}" for reason, count in sorted(totals.items())]


def _path_signal(pod: PodStatus) -> Signal | None:
    results = {path.result for path in pod.paths}
    if not results:
        return None
    if _BYPASSED in results:
        return Signal.DANGER
    return Signal.SAFE if results == {"confirmed"} else Signal.CAUTION


PODS: tuple[Column[PodStatus], ...] = (
    Column("POD", lambda pod: full_name(pod.namespace, pod.name)),
    Column("MODE", lambda pod: pod.mode, signal=lambda pod: signal_of_mode(pod.mode)),
    Column("ISOLATED", lambda pod: _reason(pod, labels.ISOLATION_READY), signal=_isolation_signal),
    Column("PROBES", lambda pod: _reason(pod, labels.PROBES_PASSING), signal=_probes_signal),
    Column("DROPPED", lambda pod: _count(pod, Verdict.DROP)),
    Column("WOULD DROP", lambda pod: _count(pod, Verdict.WOULD_DROP)),
    Column("DROP REASONS", _by_reason, is_wide=True, is_below=True),
    Column("OLD FLOWS", lambda pod: pod.existing_flows, is_wide=True),
    Column("GATES", lambda pod: [gate.interface for gate in pod.gates], is_wide=True),
    Column(
        "PATH TEST",
        lambda pod: sorted({path.result for path in pod.paths}),
        is_wide=True,
        signal=_path_signal,
    ),
    Column("ADDRESSES", lambda pod: pod.addresses, is_wide=True, is_below=True),
    Column("FROM", lambda pod: pod.source, is_wide=True, is_below=True),
)


def show(screen: Screen, report: AgentReport) -> None:
    """Print the findings first, then agent and pods."""
    findings_view.show(screen, report.findings, by="podgate status", with_advice=screen.is_wide)
    for line in head(screen, report):
        screen.line(line)
    screen.line()
    if report.pods:
        screen.table(PODS, report.pods)
    else:
        screen.line("No pods.")


def head(screen: Screen, report: AgentReport) -> Iterator[str]:
    """The agent, in a few lines."""
    running = (
        f"since {time_text(report.started)}"
        if screen.is_wide
        else f"started {screen.age(report.started)}"
    )
    yield (
        f"podgate {report.version}, pid {report.pid}, {running}; {report.programs} programs, "
        f"attached by {report.attachment}"
    )
    if screen.is_wide and report.http_address:
        yield f"metrics and health: http://{report.http_address}"
    if report.kubelet:
        yield f"kubelet: {report.kubelet}"
    yield (
        f"modes: default {report.default_mode}, at most {report.max_mode}; pods from "
        f"{report.pod_source.pods_from}"
    )
    if report.relay.is_up:
        yield _relay(report.relay)
    if report.node_drops:
        counts = [f"{count} by {reason}" for reason, count in sorted(report.node_drops.items())]
        yield f"packets dropped before an interface is chosen: {', '.join(counts)}"
    if containers := {source.cgroup for source in report.raw_sockets.sources}:
        yield (
            f"containers without a policy that create raw or packet sockets of the host: "
            f"{len(containers)}; see 'podgate drops'"
        )


def _relay(relay: RelayStatus) -> str:
    fallback = "" if relay.has_fallback else "; gates never admit the kubelet"
    return (
        f"relay: {relay.connections} connections, {relay.held_syns} SYNs held, {relay.restarts} "
        f"restarts{fallback}"
    )

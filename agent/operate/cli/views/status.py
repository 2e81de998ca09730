"""Output of `podgate status`."""

from collections.abc import Iterable, Iterator

from agent import labels
from agent.admin.report import AgentReport, PodStatus, RelayStatus
from agent.listing import listed
from agent.operate.cli.output import (
    Cell,
    Column,
    Screen,
    Signal,
    full_name,
    signal_of_mode,
    time_text,
)
from agent.pods.conditions import TRUE, Condition
from agent.pods.isolation import ENFORCED, STRICT
from bpf.verdicts import Verdict

_BYPASSED = "bypassed"
# Conditions by which a host process reaches the pod though it should not.
_OPEN = frozenset({"GateBypassed", "GateFailed", "NetnsMissing", "NetnsInvalid", "NetnsInUse"})


def _condition(pod: PodStatus, kind: str) -> Condition | None:
    return next((found for found in pod.conditions if found.type == kind), None)


def _isolation_signal(pod: PodStatus) -> Signal | None:
    condition = _condition(pod, labels.ISOLATION_READY)
    if condition is None:
        return None
    if condition.status == TRUE:
        return Signal.SAFE if condition.reason in (ENFORCED, STRICT) else Signal.CAUTION
    return Signal.DANGER if condition.reason in _OPEN else Signal.CAUTION


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
    """Print the problems first, then agent and pods, then what of the pods is not as desired."""
    for signal, text in problems(report):
        screen.line(text, signal)
    for line in head(screen, report):
        screen.line(line)
    screen.line()
    if report.pods:
        screen.table(PODS, report.pods)
    else:
        screen.line("No pods.")
    for number, (signal, text) in enumerate(pod_problems(report.pods)):
        if number == 0:
            screen.line()
        screen.line(text, signal)


# Also "": the probe is answered.
_PASSING_OBSTACLES = frozenset({"", "no_verdict", "stale"})


def problems(report: AgentReport) -> list[tuple[Signal, str]]:
    """What is not as it should be, without the pods; the most dangerous first."""
    found = list(_problems(report))
    return sorted(found, key=lambda problem: problem[0] is not Signal.DANGER)


def _problems(report: AgentReport) -> Iterator[tuple[Signal, str]]:
    if report.open_ports:
        yield Signal.DANGER, _sentence(report.open_ports)
    elif report.kubelet is None:
        why = report.kubelet_problem or "the report has no reason."
        yield Signal.CAUTION, f"Kubelet not identified: {why}"
    if report.max_mode == "off":
        yield Signal.DANGER, f"podgate is off on this node, by {report.max_mode_from}."
    if not report.is_synced:
        yield Signal.CAUTION, "The first pass over all pods is not finished."
    for problem in report.pod_source.problems:
        yield Signal.CAUTION, problem
    if pending := report.pod_source.pending_conditions:
        yield Signal.CAUTION, f"Conditions of {pending} pods are not written to the API yet."
    if report.kubelet_unfollowed:
        yield (
            Signal.CAUTION,
            "Without the agent the kernel does not follow the kubelet's restarts: "
            f"{report.kubelet_unfollowed}",
        )
    for problem in report.server_problems:
        yield Signal.CAUTION, problem
    for hook in report.hooks:
        if hook.problem:
            yield (
                Signal.CAUTION,
                f"Hook {hook.name} does not work: {hook.problem}. Gates still drop.",
            )
    if report.raw_sockets.problem:
        yield (
            Signal.CAUTION,
            f"--raw-sockets={report.raw_sockets.mode}: {report.raw_sockets.problem}",
        )
    if report.relay.problem:
        signal = Signal.CAUTION if report.relay.has_fallback else Signal.DANGER
        yield signal, _sentence(report.relay.problem_text)


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


def pod_problems(pods: list[PodStatus]) -> Iterator[tuple[Signal, str]]:
    """What of the pods is not as desired: conditions, labels without effect, open flows."""
    for problem, names in _mode_problems(pods).items():
        yield Signal.CAUTION, f"{problem} Pods: {listed(names)}."
    for pod in pods:
        name = full_name(pod.namespace, pod.name)
        if pod.existing_flows:
            yield (
                Signal.CAUTION,
                f"{name}: {pod.existing_flows} flows opened before enforcement are still open; "
                "--close-existing-flows closes such flows.",
            )
        for probe in pod.probes:
            if probe.answer is not None and probe.answer.obstacle not in _PASSING_OBSTACLES:
                kind = probe.type.lower()
                yield (
                    Signal.CAUTION,
                    f"{name}: {kind} of {probe.container}: {probe.answer.problem}",
                )
        for condition in pod.conditions:
            if condition.status != TRUE:
                signal = Signal.DANGER if condition.reason in _OPEN else Signal.CAUTION
                kind = condition.type.rpartition("/")[2]
                yield (
                    signal,
                    f"{name}: {kind} is {condition.status} ({condition.reason}): "
                    f"{condition.message}",
                )


def _relay(relay: RelayStatus) -> str:
    full = "; full: new connections go directly to the gate" if relay.is_bypassed else ""
    fallback = "" if relay.has_fallback else "; gates never admit the kubelet"
    return (
        f"relay: {relay.connections} connections, {relay.held_syns} SYNs held, {relay.restarts} "
        f"restarts{full}{fallback}"
    )


def _mode_problems(pods: Iterable[PodStatus]) -> dict[str, list[str]]:
    """The pods of each problem: a label of a namespace or node is that of many."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        for problem in pod.mode_problems:
            found.setdefault(problem, []).append(full_name(pod.namespace, pod.name))
    return found


def _sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."

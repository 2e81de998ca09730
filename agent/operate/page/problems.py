"""What an operator has to know first: everything that is not as desired, the worst first."""

import dataclasses
import enum
from collections.abc import Iterator

from agent import labels
from agent.admin.report import AgentReport, PodStatus
from agent.pods.conditions import TRUE


class Severity(enum.IntEnum):
    """How bad it is; the value orders."""

    OPEN = 0
    """Host processes reach a pod that should be closed, or podgate does not work."""
    DEGRADED = 1
    """Something is not as desired."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One sentence; pods: that have it, none for the node."""

    severity: Severity
    text: str
    pods: tuple[str, ...] = ()


def find(report: AgentReport) -> list[Problem]:
    """All problems of the node and of its pods, the worst first."""
    return sorted([*_of_node(report), *_of_pods(report.pods)], key=lambda problem: problem.severity)


def has_problem(pod: PodStatus) -> bool:
    """Whether a pod has one."""
    return any(True for _ in _texts(pod))


def full_name(pod: PodStatus) -> str:
    return f"{pod.namespace}/{pod.name}" if pod.namespace else pod.name


def _of_node(report: AgentReport) -> Iterator[Problem]:
    if report.open_ports:
        yield Problem(Severity.OPEN, report.open_ports)
    elif report.kubelet is None and report.kubelet_problem:
        yield Problem(Severity.DEGRADED, f"kubelet not identified: {report.kubelet_problem}")
    if report.max_mode == "off":
        by = f" by {report.max_mode_from}" if report.max_mode_from else ""
        yield Problem(Severity.OPEN, f"podgate is off{by}: all pods are open.")
    if not report.is_synced:
        yield Problem(Severity.DEGRADED, "The initial pod sync is not finished.")
    if report.kubelet_unfollowed:
        text = "without the agent the kernel does not follow the kubelet's restarts: "
        yield Problem(Severity.DEGRADED, text + report.kubelet_unfollowed)
    if report.relay.problem:
        severity = Severity.DEGRADED if report.relay.has_fallback else Severity.OPEN
        yield Problem(severity, f"{report.relay.problem_text}.")
    if report.relay.is_bypassed:
        text = "The relay is full: new connections of the kubelet go directly to the gate."
        yield Problem(Severity.DEGRADED, text)
    for hook in report.hooks:
        if hook.problem:
            text = f"{hook.name} does not work: {hook.problem}; gates still drop."
            yield Problem(Severity.DEGRADED, text)
    if report.raw_sockets.problem:
        yield Problem(Severity.DEGRADED, report.raw_sockets.problem)
    for text in report.pod_source.problems:
        yield Problem(Severity.DEGRADED, text)


def _of_pods(pods: list[PodStatus]) -> Iterator[Problem]:
    """A label of a namespace or node is that of many pods: one problem for all of them."""
    found: dict[tuple[Severity, str], list[str]] = {}
    for pod in pods:
        for problem in _texts(pod):
            found.setdefault(problem, []).append(full_name(pod))
    for (severity, text), names in found.items():
        yield Problem(severity, text, tuple(names))


def _texts(pod: PodStatus) -> Iterator[tuple[Severity, str]]:
    for path in pod.paths:
        if path.result == "bypassed":
            yield Severity.OPEN, "Host packets reach an address of the pod past its gate."
            break
    for condition in pod.conditions:
        if condition.status != TRUE:
            is_open = condition.type == labels.ISOLATION_READY
            severity = Severity.OPEN if is_open else Severity.DEGRADED
            short = condition.type.partition("/")[2]
            yield severity, f"{short} is {condition.status}: {condition.message}"
    for text in pod.mode_problems:
        yield Severity.DEGRADED, text
    if pod.existing_flows:
        yield (
            Severity.DEGRADED,
            "Flows that the host opened before enforcement are still open; "
            "--close-existing-flows closes such flows.",
        )

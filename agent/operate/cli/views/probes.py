"""Output of `podgate probes`: podgate's probes and the kubelet's in one table."""

import dataclasses

import msgspec

from agent.admin.report import (
    AgentReport,
    AnswerStatus,
    PodStatus,
    ProbeStatus,
    RelayedPortStatus,
)
from agent.listing import full_name
from agent.operate.cli.output import Column, Screen, Signal


class PodProbes(msgspec.Struct, frozen=True, rename="camel"):
    """Probes of one pod, in JSON."""

    namespace: str
    name: str
    podgate: list[ProbeStatus]
    kubelet: list[RelayedPortStatus]


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeRow:
    """One probe of podgate, or one port that the kubelet connected to."""

    pod: str
    container: str
    probe: str
    by: str
    handler: str
    result: str
    is_success: bool
    families: list[str]
    successes: int
    failures: int
    connect: str
    last_response: str
    answer: str = ""
    """What the kubelet's probe gets, where podgate is to answer it."""


PROBES: tuple[Column[ProbeRow], ...] = (
    Column("POD", lambda row: row.pod),
    Column("CONTAINER", lambda row: row.container),
    Column("PROBE", lambda row: row.probe),
    Column("BY", lambda row: row.by),
    Column(
        "RESULT",
        lambda row: row.result,
        signal=lambda row: Signal.SAFE if row.is_success else Signal.CAUTION,
    ),
    Column("HANDLER", lambda row: row.handler, is_below=True),
    Column("FAMILY", lambda row: row.families, is_wide=True),
    Column("OK", lambda row: row.successes, is_wide=True),
    Column("FAILED", lambda row: row.failures),
    Column("CONNECT", lambda row: row.connect, is_wide=True),
    Column("ANSWER TO KUBELET", lambda row: row.answer, is_below=True),
    Column("LAST RESPONSE", lambda row: row.last_response, is_below=True),
)


def documents(pods: list[PodStatus]) -> list[PodProbes]:
    return [PodProbes(pod.namespace, pod.name, pod.probes, pod.relayed) for pod in pods]


def rows(pods: list[PodStatus]) -> list[ProbeRow]:
    return [
        row
        for pod in pods
        for row in (
            *(_of_podgate(pod, probe) for probe in pod.probes),
            *(_of_kubelet(pod, relayed) for relayed in pod.relayed),
        )
    ]


def show(screen: Screen, report: AgentReport, found: list[ProbeRow]) -> None:
    """Print the probes, and why the kubelet's are not visible."""
    if found:
        screen.table(PROBES, found)
    else:
        screen.line("No probes.")
    if report.relay.problem:
        screen.line(
            f"Probes of the kubelet are not visible: {report.relay.problem}", Signal.CAUTION
        )


def answer_text(answer: AnswerStatus) -> str:
    """As in "healthy, 0.2 s old", or why it is not answered."""
    if answer.verdict:
        return f"{answer.verdict}, {answer.age_seconds or 0:.1f} s old"
    return f"none ({answer.obstacle}): {answer.problem}"


def _of_podgate(pod: PodStatus, probe: ProbeStatus) -> ProbeRow:
    first, *_ = probe.last_message.splitlines() or [""]
    return ProbeRow(
        pod=full_name(pod.namespace, pod.name),
        container=probe.container,
        probe=probe.type.lower(),
        by="podgate",
        handler=probe.handler,
        result=probe.result,
        is_success=probe.result == "success",
        families=probe.families,
        successes=probe.successes,
        failures=probe.failures,
        connect="",
        last_response=first,
        answer=answer_text(probe.answer) if probe.answer else "",
    )


def _of_kubelet(pod: PodStatus, relayed: RelayedPortStatus) -> ProbeRow:
    """The relay does not see the kubelet's verdict: a proxied connection counts as a success."""
    proxied = relayed.outcomes.get("proxied", 0)
    outcomes = [f"{outcome} {count}" for outcome, count in sorted(relayed.outcomes.items())]
    return ProbeRow(
        pod=full_name(pod.namespace, pod.name),
        container=relayed.container,
        probe=relayed.handler or "undeclared",
        by="kubelet",
        handler=f"port {relayed.port}" if relayed.port else "undeclared ports",
        result=relayed.last_outcome,
        is_success=relayed.last_outcome == "proxied",
        families=[],
        successes=proxied,
        failures=sum(relayed.outcomes.values()) - proxied,
        connect="" if relayed.open_ms is None else f"{relayed.open_ms:.2f} ms",
        last_response=", ".join(outcomes),
    )

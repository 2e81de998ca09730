"""Output of `podgate probes`: podgate's probes and the kubelet's in one table."""

import msgspec
import rich.markup
import rich.table

from agent.admin.report import AgentReport, PodStatus, ProbeStatus, RelayedPortStatus
from agent.cli.views import tables

_MESSAGE_CHARACTERS = 60


class PodProbesRow(msgspec.Struct, frozen=True, rename="camel"):
    """Probes of one pod, in JSON."""

    namespace: str
    name: str
    podgate: list[ProbeStatus]
    kubelet: list[RelayedPortStatus]


def show(report: AgentReport) -> None:
    """Print the probes of the agent's report."""
    console = tables.console()
    if any(pod.probes or pod.relayed for pod in report.pods):
        console.print(table(report.pods))
    else:
        console.print("No probes.")
    if report.relay.problem:
        console.print(
            f"Probes of the kubelet are not visible: {report.relay.problem}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def rows(report: AgentReport) -> list[PodProbesRow]:
    return [PodProbesRow(pod.namespace, pod.name, pod.probes, pod.relayed) for pod in report.pods]


def table(pods: list[PodStatus]) -> rich.table.Table:
    """One line per probe of podgate, and per port that the kubelet connected to."""
    made = tables.table(
        "POD", "CONTAINER", "PROBE", "BY", "HANDLER", "RESULT", "FAMILY", "OK", "FAILED", "CONNECT",
        "LAST RESPONSE",
    )  # fmt: skip
    for pod in pods:
        name = tables.full_name(pod.namespace, pod.name)
        for probe in pod.probes:
            made.add_row(name, *_of_podgate(probe))
        for relayed in pod.relayed:
            made.add_row(name, *_of_kubelet(relayed))
    return made


def _of_podgate(probe: ProbeStatus) -> tuple[str, ...]:
    message = probe.last_message.splitlines()[0] if probe.last_message else "-"
    return (
        probe.container,
        probe.type.lower(),
        "podgate",
        probe.handler,
        _coloured(probe.result, is_success=probe.result == "success"),
        " ".join(probe.families) or "-",
        str(probe.successes),
        str(probe.failures),
        "-",
        rich.markup.escape(message[:_MESSAGE_CHARACTERS]),
    )


def _of_kubelet(relayed: RelayedPortStatus) -> tuple[str, ...]:
    """The relay does not see the kubelet's verdict: a proxied connection counts as a success."""
    proxied = relayed.outcomes.get("proxied", 0)
    return (
        relayed.container or "-",
        relayed.handler or "-",
        "kubelet",
        f":{relayed.port}" if relayed.port else "other ports",
        _coloured(relayed.last_outcome, is_success=relayed.last_outcome == "proxied"),
        "-",
        str(proxied),
        str(sum(relayed.outcomes.values()) - proxied),
        "-" if relayed.open_ms is None else f"{relayed.open_ms:.2f} ms",
        ", ".join(f"{outcome} {count}" for outcome, count in sorted(relayed.outcomes.items())),
    )


def _coloured(text: str, *, is_success: bool) -> str:
    return f"[{'green' if is_success else 'red'}]{text}[/]"

"""Output of `podgate probes`: podgate's probes and the kubelet's in one table."""

import msgspec
import rich.markup
import rich.table

from agent.admin.report import CarriedStatus, PodStatus, ProbeStatus, Report
from agent.cli.views import tables

_MESSAGE_CHARACTERS = 60


class PodProbesRow(msgspec.Struct, frozen=True):
    """Probes of one pod, in JSON."""

    namespace: str
    name: str
    podgate: list[ProbeStatus]
    kubelet: list[CarriedStatus]


def show(content: bytes) -> None:
    """Print the probes of the agent's report."""
    report = msgspec.json.decode(content, type=Report)
    console = tables.console()
    if any(pod.probes or pod.carried for pod in report.pods):
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


def as_json(content: bytes) -> bytes:
    report = msgspec.json.decode(content, type=Report)
    pods = [PodProbesRow(pod.namespace, pod.name, pod.probes, pod.carried) for pod in report.pods]
    return msgspec.json.encode(pods)


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
        for carried in pod.carried:
            made.add_row(name, *_of_kubelet(carried))
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


def _of_kubelet(carried: CarriedStatus) -> tuple[str, ...]:
    """The relay does not see the kubelet's verdict: a proxied connection counts as a success."""
    proxied = carried.outcomes.get("proxied", 0)
    return (
        carried.container or "-",
        carried.handler or "-",
        "kubelet",
        f":{carried.port}" if carried.port else "other ports",
        _coloured(carried.last_outcome, is_success=carried.last_outcome == "proxied"),
        "-",
        str(proxied),
        str(sum(carried.outcomes.values()) - proxied),
        "-" if carried.open_ms is None else f"{carried.open_ms:.2f} ms",
        ", ".join(f"{outcome} {count}" for outcome, count in sorted(carried.outcomes.items())),
    )


def _coloured(text: str, *, is_success: bool) -> str:
    return f"[{'green' if is_success else 'red'}]{text}[/]"

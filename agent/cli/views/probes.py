"""Probes for people: podgate's own and the kubelet's, in one table."""

import msgspec
import rich.markup
import rich.table

from agent.admin.report import CarriedStatus, PodStatus, ProbeStatus, Report
from agent.cli.views import tables

_MESSAGE_CHARACTERS = 60


class PodProbes(msgspec.Struct, frozen=True):
    """One pod's, for programs."""

    namespace: str
    name: str
    podgate: list[ProbeStatus]
    kubelet: list[CarriedStatus]


def show(content: bytes) -> None:
    """Print the probes of the admin API's report."""
    report = msgspec.json.decode(content, type=Report)
    console = tables.console()
    if any(pod.probes or pod.carried for pod in report.pods):
        console.print(table(report.pods))
    else:
        console.print("No pod is probed.")
    if report.relay.problem:
        console.print(
            f"The kubelet's are not seen: {report.relay.problem}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def as_json(content: bytes) -> bytes:
    report = msgspec.json.decode(content, type=Report)
    pods = [PodProbes(pod.namespace, pod.name, pod.probes, pod.carried) for pod in report.pods]
    return msgspec.json.encode(pods)


def table(pods: list[PodStatus]) -> rich.table.Table:
    """One line for each probe of podgate's, and for each port that the kubelet came to."""
    made = tables.table(
        "POD", "CONTAINER", "PROBE", "BY", "ASKS", "RESULT", "FAMILY", "OK", "FAILED", "OPENS IN",
        "LAST ANSWER",
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
        _coloured(probe.result, is_well=probe.result == "success"),
        " ".join(probe.families) or "-",
        str(probe.successes),
        str(probe.failures),
        "-",
        rich.markup.escape(message[:_MESSAGE_CHARACTERS]),
    )


def _of_kubelet(carried: CarriedStatus) -> tuple[str, ...]:
    """What the kubelet made of an answer is its own; here a connection that opened and was let end
    is well."""
    well = carried.outcomes.get("carried", 0)
    return (
        carried.container or "-",
        carried.handler or "-",
        "kubelet",
        f":{carried.port}" if carried.port else "other ports",
        _coloured(carried.last_outcome, is_well=carried.last_outcome == "carried"),
        "-",
        str(well),
        str(sum(carried.outcomes.values()) - well),
        "-" if carried.open_ms is None else f"{carried.open_ms:.2f} ms",
        ", ".join(f"{outcome} {count}" for outcome, count in sorted(carried.outcomes.items())),
    )


def _coloured(text: str, *, is_well: bool) -> str:
    return f"[{'green' if is_well else 'red'}]{text}[/]"

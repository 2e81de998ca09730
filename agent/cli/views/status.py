"""Output of `podgate status`, `drops` and `rules`."""

import rich.console
import rich.markup
import rich.table

from agent.admin.report import (
    AgentReport,
    DropEvents,
    DropEventStatus,
    Drops,
    GateStatus,
    PodStatus,
    RawSocketSourceStatus,
    RawSocketStatus,
    RelayStatus,
    RulesReport,
    RuleStatus,
    SourceProcessStatus,
)
from agent.cli.views import probes as probes_view
from agent.cli.views import tables
from agent.pods.conditions import TRUE, Condition

_MAX_PODS = 5

_SHOWN_VERDICTS = ("drop", "would-drop")


def show(report: AgentReport) -> None:
    """Print the agent's report as tables."""
    console = tables.console()
    console.print(
        f"podgate {report.version}, pid {report.pid}, since {report.started:%Y-%m-%d %H:%M:%S}Z; "
        f"{report.programs} programs, attached by {report.attachment}; "
        f"http://{report.http_address}/metrics; "
        + (f"kubelet in {report.kubelet}" if report.kubelet else "kubelet not identified"),
        highlight=False,
        soft_wrap=True,
    )
    pending = report.pod_source.pending_conditions
    console.print(
        f"default mode {report.default_mode}, at most {report.max_mode}"
        + (f" by {report.max_mode_from}" if report.max_mode == "off" else "")
        + "; "
        f"pods from {report.pod_source.pods_from}"
        + (f"; conditions of {pending} pods not written yet" if pending else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for problem in report.pod_source.problems:
        console.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if report.kubelet is None and report.kubelet_problem:
        console.print(
            report.open_ports or f"kubelet not identified: {report.kubelet_problem}",
            style="red" if report.open_ports else "yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if report.kubelet_unfollowed:
        console.print(
            "without the agent the kernel does not follow the kubelet's restarts: "
            f"{report.kubelet_unfollowed}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for hook in report.hooks:
        if hook.problem:
            console.print(
                f"{hook.name} is not attached: {hook.problem}; gates still drop",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if report.node_drops:
        counts = ", ".join(f"{reason}: {n}" for reason, n in sorted(report.node_drops.items()))
        console.print(f"dropped before an interface is chosen: {counts}", highlight=False)
    _show_raw_sockets(console, report.raw_sockets)
    console.print(_pods(report.pods))
    if any(pod.probes or pod.relayed for pod in report.pods):
        console.print(probes_view.table(report.pods))
    _show_relay(console, report.relay)
    for problem, names in _mode_problems(report.pods).items():
        console.print(
            f"{problem} Pods: {_listed(names)}.",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for pod in report.pods:
        name = tables.full_name(pod.namespace, pod.name)
        if pod.existing_flows:
            console.print(
                f"{name}: {pod.existing_flows} flows opened before enforcement are still open; "
                "--close-existing-flows closes such flows.",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        for condition in pod.conditions:
            if condition.status != TRUE:
                console.print(
                    f"{name}: {condition.type} is {condition.status}: {condition.message}",
                    style="yellow",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )


def _mode_problems(pods: list[PodStatus]) -> dict[str, list[str]]:
    """The pods of each problem: a label of a namespace or node is that of many."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        for problem in pod.mode_problems:
            found.setdefault(problem, []).append(tables.full_name(pod.namespace, pod.name))
    return found


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_PODS
    return ", ".join(names[:_MAX_PODS]) + (f" and {more} more" if more > 0 else "")


def _show_raw_sockets(console: rich.console.Console, raw_sockets: RawSocketStatus) -> None:
    if raw_sockets.problem:
        console.print(
            f"--raw-sockets={raw_sockets.mode}: {raw_sockets.problem}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if containers := {source.cgroup for source in raw_sockets.sources}:
        console.print(
            f"{len(containers)} containers without a policy create raw or packet sockets of the "
            "host: see 'podgate drops'",
            highlight=False,
            soft_wrap=True,
        )


def _show_relay(console: rich.console.Console, relay: RelayStatus) -> None:
    if relay.problem:
        console.print(
            relay.problem_text,
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if relay.is_up:
        console.print(
            f"relay: {relay.connections} connections, {relay.held_syns} SYNs held, "
            f"{relay.restarts} restarts"
            + ("; full: new connections go directly to the gate" if relay.is_bypassed else "")
            + ("" if relay.has_fallback else "; gates never admit the kubelet"),
            highlight=False,
        )


def show_drops(drops: Drops) -> None:
    """Print the sources of dropped traffic."""
    console = tables.console()
    if not drops.sources:
        console.print("No host process has opened a flow to a gated pod without a rule.")
    else:
        table = tables.table("POD", "MODE", "TO", "SOURCE", "PROCESS", "PACKETS", "FIRST", "LAST")
        for source in drops.sources:
            table.add_row(
                tables.full_name(source.namespace, source.pod),
                source.mode,
                _target(source),
                rich.markup.escape(source.cgroup),
                rich.markup.escape(source.process) or "-",
                str(source.packets),
                f"{source.first:%m-%d %H:%M:%S}",
                f"{source.last:%m-%d %H:%M:%S}",
            )
        console.print(table)
    if drops.lost_packets:
        console.print(
            f"{drops.lost_packets} packets of further sources are not listed: the kernel had no "
            "memory for them."
        )
    if drops.raw_sockets:
        console.print(_raw_sockets(drops.raw_sockets))


def _raw_sockets(sources: list[RawSocketSourceStatus]) -> rich.table.Table:
    table = tables.table("SOCKETS", "VERDICT", "SOURCE", "PROCESS", "NUMBER", "FIRST", "LAST")
    for source in sources:
        table.add_row(
            source.family,
            source.verdict,
            rich.markup.escape(source.cgroup),
            rich.markup.escape(source.process),
            str(source.sockets),
            f"{source.first:%m-%d %H:%M:%S}",
            f"{source.last:%m-%d %H:%M:%S}",
        )
    return table


def _target(source: SourceProcessStatus) -> str:
    if source.has_many_ports:
        return f"{source.protocol} many ports"
    return f"{source.protocol} {source.port}" if source.port else source.protocol


def show_drop_events(events: DropEvents) -> None:
    """Print one line per event."""
    console = tables.console()
    for event in events.events:
        console.print(_drop_event(event), markup=False, highlight=False, soft_wrap=True)


def _drop_event(event: DropEventStatus) -> str:
    process = f"{event.process_name} ({event.process})" if event.process else ""
    source = _endpoint(event.source_address, event.source_port)
    target = _endpoint(event.destination_address, event.destination_port)
    path = " -> ".join(filter(None, (source, target)))
    pod = tables.full_name(event.namespace, event.pod)
    verdict = f"{event.verdict} {event.reason}"
    words = (verdict, pod, event.protocol, path, "from", event.cgroup, process)
    return " ".join([f"{event.at:%H:%M:%S.%f}"[:-3], *filter(None, words)])


def _endpoint(address: str, port: int) -> str:
    return f"{address} port {port}" if address and port else address


def show_rules(rules: RulesReport) -> None:
    """Print each rule of each policy, and the problems."""
    console = tables.console()
    if not rules.sources:
        console.print("The agent runs without --rules: only the kubelet is admitted.")
    elif not rules.policies:
        sources = " or ".join(rules.sources)
        console.print(f"No policy of {sources} is in force.", markup=False, soft_wrap=True)
    else:
        table = tables.table("POLICY", "FROM", "TO", "PODS", "HITS")
        for policy in rules.policies:
            pods = _listed(policy.pods) or "none here"
            for rule in policy.rules:
                cells = (policy.name, rule.source, _ports(rule), pods, str(rule.hits))
                table.add_row(*map(rich.markup.escape, cells))
        console.print(table)
    absent = [rule.problem for policy in rules.policies for rule in policy.rules if rule.problem]
    for problem in (*rules.problems, *dict.fromkeys(absent)):
        console.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _ports(rule: RuleStatus) -> str:
    if rule.ports == "any":
        return "anything" if rule.protocol == "any" else rule.protocol
    return f"{rule.protocol} {rule.ports}"


def _pods(pods: list[PodStatus]) -> rich.table.Table:
    table = tables.table(
        "POD", "MODE", "ISOLATED", "PROBES", "GATES", "PATH TEST", "DROPPED", "WOULD DROP"
    )
    for pod in pods:
        by_type = {condition.type.split("/")[1]: condition for condition in pod.conditions}
        table.add_row(
            tables.full_name(pod.namespace, pod.name),
            pod.mode,
            _condition(by_type.get("isolation-ready")),
            _condition(by_type.get("probes-passing")),
            ", ".join(gate.interface for gate in pod.gates) or "-",
            _path_test({path.result for path in pod.paths}),
            *(_packets(pod.gates, verdict) for verdict in _SHOWN_VERDICTS),
        )
    return table


def _condition(condition: Condition | None) -> str:
    if condition is None:
        return "-"
    colour = "green" if condition.status == TRUE else "red"
    return f"[{colour}]{condition.reason}[/]"


def _path_test(results: set[str]) -> str:
    colours = {"confirmed": "green", "bypassed": "red"}
    return ", ".join(f"[{colours.get(each, 'yellow')}]{each}[/]" for each in sorted(results)) or "-"


def _packets(gates: list[GateStatus], verdict: str) -> str:
    """As "fragment: 1, host-process: 4" over all gates of a pod."""
    totals: dict[str, int] = {}
    for gate in gates:
        for reason, count in gate.packets.get(verdict, {}).items():
            totals[reason] = totals.get(reason, 0) + count
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(totals.items())) or "-"

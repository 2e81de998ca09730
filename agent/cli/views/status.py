"""`podgate status`, `drops` and `rules` for people."""

import msgspec
import rich.console
import rich.markup
import rich.table

from agent.admin.report import (
    Drops,
    GateStatus,
    PodStatus,
    Refusals,
    RefusalStatus,
    RelayStatus,
    Report,
    Rules,
    RuleStatus,
)
from agent.cli.views import probes as probes_view
from agent.cli.views import tables
from agent.pods.conditions import TRUE, Condition

_MOST_PODS = 5

_SHOWN_VERDICTS = ("drop", "would-drop")


def show(content: bytes) -> None:
    """Print the admin API's report as tables."""
    report = msgspec.json.decode(content, type=Report)
    console = tables.console()
    programs = "compiled at start" if report.was_compiled else "already pinned"
    console.print(
        f"podgate {report.version}, pid {report.pid}, since {report.started:%Y-%m-%d %H:%M:%S}Z; "
        f"programs {programs}, attached by {report.attachment}; "
        f"http://{report.http_address}/metrics; "
        + (f"kubelet in {report.kubelet}" if report.kubelet else "no kubelet known"),
        highlight=False,
        soft_wrap=True,
    )
    unsaid = report.feed.unsaid
    console.print(
        f"pods from {report.feed.pods_from}"
        + (f"; conditions of {unsaid} still to be written" if unsaid else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for problem in report.feed.problems:
        console.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for hook in report.hooks:
        if hook.problem:
            console.print(
                f"{hook.name} is not in force: {hook.problem}; the gates drop all the same",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if report.node_refusals:
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(report.node_refusals.items()))
        console.print(f"refused before an interface was chosen: {counts}", highlight=False)
    console.print(_pods(report.pods))
    if any(pod.probes or pod.carried for pod in report.pods):
        console.print(probes_view.table(report.pods))
    _show_relay(console, report.relay)
    for pod in report.pods:
        name = tables.full_name(pod.namespace, pod.name)
        if pod.older_flows:
            console.print(
                f"{name}: {pod.older_flows} flows that the node began before the gate "
                "enforced go on; --close-existing-flows ends such.",
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


def _show_relay(console: rich.console.Console, relay: RelayStatus) -> None:
    if relay.problem:
        console.print(
            f"strict is enforce: {relay.problem}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if relay.is_up:
        console.print(
            f"relay: {relay.open} connections, {relay.held} held, {relay.restarts} restarts"
            + (", no room for more: the kubelet's go by the gate" if relay.is_direct else ""),
            highlight=False,
        )


def show_drops(content: bytes) -> None:
    """Print who is refused, or would be."""
    drops = msgspec.json.decode(content, type=Drops)
    console = tables.console()
    if not drops.callers:
        console.print("No process of the node has started anything towards a gated pod.")
    else:
        table = tables.table("POD", "MODE", "TO", "SENDER", "PROCESS", "PACKETS", "FIRST", "LAST")
        for caller in drops.callers:
            table.add_row(
                tables.full_name(caller.namespace, caller.pod),
                caller.mode,
                f"{caller.protocol} {caller.port}" if caller.port else caller.protocol,
                rich.markup.escape(caller.sender),
                rich.markup.escape(caller.process) or "-",
                str(caller.packets),
                f"{caller.first:%m-%d %H:%M:%S}",
                f"{caller.last:%m-%d %H:%M:%S}",
            )
        console.print(table)
    if drops.lost_packets:
        console.print(f"{drops.lost_packets} packets of further senders found no place.")


def show_refusals(refusals: Refusals) -> None:
    """Print one line for each."""
    console = tables.console()
    for one in refusals.refusals:
        console.print(_refusal(one), markup=False, highlight=False, soft_wrap=True)


def _refusal(one: RefusalStatus) -> str:
    who = f"{one.process_name} ({one.process})" if one.process else ""
    source = f"{one.source}{_port(one.source_port)}" if one.source else ""
    target = f"{one.destination}{_port(one.destination_port)}" if one.destination else ""
    way = " -> ".join(filter(None, (source, target)))
    pod = tables.full_name(one.namespace, one.pod)
    words = (f"{one.verdict} {one.reason}", pod, one.protocol, way, "from", one.sender, who)
    return " ".join([f"{one.at:%H:%M:%S.%f}"[:-3], *filter(None, words)])


def _port(number: int) -> str:
    return f" port {number}" if number else ""


def show_rules(content: bytes) -> None:
    """Print every rule of every policy, and what is wrong."""
    rules = msgspec.json.decode(content, type=Rules)
    console = tables.console()
    if not rules.sources:
        console.print("The agent was started without --rules: only the kubelet is let in.")
    elif not rules.policies:
        sources = " or ".join(rules.sources)
        console.print(f"No policy of {sources} is in force.", markup=False, soft_wrap=True)
    else:
        table = tables.table("POLICY", "FROM", "TO", "PODS", "HITS")
        for policy in rules.policies:
            pods = ", ".join(policy.pods[:_MOST_PODS]) or "none here"
            if more := policy.pods[_MOST_PODS:]:
                pods += f" and {len(more)} more"
            for rule in policy.rules:
                cells = (policy.name, rule.sender, _ports(rule), pods, str(rule.hits))
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
        "POD", "MODE", "ISOLATED", "PROBES", "GATES", "SELF-TEST", "DROPPED", "WOULD DROP"
    )
    for pod in pods:
        by_type = {condition.type.split("/")[1]: condition for condition in pod.conditions}
        table.add_row(
            tables.full_name(pod.namespace, pod.name),
            pod.mode,
            _condition(by_type.get("isolation-ready")),
            _condition(by_type.get("probes-passing")),
            ", ".join(gate.interface for gate in pod.gates) or "-",
            _self_test({path.result for path in pod.paths}),
            *(_packets(pod.gates, verdict) for verdict in _SHOWN_VERDICTS),
        )
    return table


def _condition(condition: Condition | None) -> str:
    if condition is None:
        return "-"
    colour = "green" if condition.status == TRUE else "red"
    return f"[{colour}]{condition.reason}[/]"


def _self_test(results: set[str]) -> str:
    colours = {"confirmed": "green", "bypassed": "red"}
    return ", ".join(f"[{colours.get(each, 'yellow')}]{each}[/]" for each in sorted(results)) or "-"


def _packets(gates: list[GateStatus], verdict: str) -> str:
    """As "node 4, fragment 1" over all of a pod's gates."""
    totals: dict[str, int] = {}
    for gate in gates:
        for reason, count in gate.packets.get(verdict, {}).items():
            totals[reason] = totals.get(reason, 0) + count
    return ", ".join(f"{reason} {count}" for reason, count in sorted(totals.items())) or "-"

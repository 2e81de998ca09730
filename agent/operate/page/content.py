"""The page's sections. `full_page` names pods and processes, `public_page` has only counts."""

import collections
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from agent import labels
from agent.admin import finding, findings
from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Severity
from agent.admin.report import (
    AgentReport,
    Drops,
    GateStatus,
    PodStatus,
    ProbeStatus,
    RelayedPortStatus,
    SourceProcessStatus,
)
from agent.listing import listed
from agent.operate.page import sparkline, style
from agent.operate.page.markup import Markup, Node, document, element, join
from agent.operate.text import ago

RELOAD_SECONDS = 10
"""How often an open page loads itself again; there is no script to do less."""

_MAX_NAMES = 8
# Of a server's response, which may have 10 KiB.
_MAX_CHARACTERS = 200
# The busiest; the table of a node has room for thousands.
_MAX_SOURCES = 100
_MODE_CLASSES = {"off": "open", "audit": "part", "enforce": "closed", "strict": "closed"}
_STATE_CLASSES = {"confirmed": "closed", "bypassed": "open", "success": "closed"}

Row = TypeVar("Row")
_Merged = tuple[Finding, list[str]]
"""A finding, and all pods that it concerns."""
_Column = tuple[str, Callable[[Row], Node]]


def full_page(report: AgentReport, drops: Drops, *, now: datetime.datetime) -> bytes:
    """Everything, for clients that may read the names of pods and processes."""
    found = finding.merged(report.findings)
    shown = [
        _header(
            f"podgate {report.version}",
            found,
            f"since {_time(report.started)}, programs attached by {report.attachment}",
        ),
        _tiles(report),
        _finding_list(found),
        _pods(report),
        _probes(report.pods),
        _drops(drops, now),
        _relay(report),
        _node(report),
    ]
    return _page(shown, f"Loads again every {RELOAD_SECONDS} s.", now)


def public_page(report: AgentReport, *, now: datetime.datetime) -> bytes:
    """Health and counts of the node, without any name or sentence that may contain one."""
    found = finding.merged(report.findings)
    footer = "Names of pods and processes, and problems in words, need the rights to read /metrics."
    return _page([_header("podgate", found, ""), _tiles(report)], footer, now)


def _page(sections: Sequence[Markup], footer: str, now: datetime.datetime) -> bytes:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=RELOAD_SECONDS),
        element("meta", name="robots", content="noindex"),
        element("title", "podgate"),
        element("style", Markup(style.CSS)),
    )
    end = element("footer", f"{footer} As of {_time(now)}.")
    return document(head, element("body", element("main", *sections, end)))


def _header(title: str, found: Sequence[_Merged], about: str) -> Markup:
    words, kind = "no findings", "closed"
    if found:
        words, kind = _count(len(found), "finding"), _severity_class(found[0][0])
    state = element("span", words, class_=f"state {kind}")
    return element("header", element("h1", title), state, element("span", about, class_="soft"))


def _tiles(report: AgentReport) -> Markup:
    modes = collections.Counter(pod.mode for pod in report.pods)
    in_force = sum(map(_is_as_desired, report.pods))
    kubelet = ("identified", "closed") if report.kubelet else ("not identified", "part")
    tiles = [
        _tile("pods", len(report.pods)),
        *(_tile(mode, modes[mode], kind) for mode, kind in _MODE_CLASSES.items() if modes[mode]),
        _tile("as desired", f"{in_force} of {len(report.pods)}"),
        _tile("gates", sum(len(pod.gates) for pod in report.pods)),
        _tile("dropped", _total(report.pods, "drop")),
        _tile("would drop", _total(report.pods, "would-drop")),
        _tile("relay", *_relay_state(report)),
        _tile("kubelet", *kubelet),
    ]
    return element("div", *tiles, class_="tiles")


def _tile(name: str, value: Node, kind: str = "") -> Markup:
    shown = element("b", value, class_=kind)
    return element("div", shown, element("span", name, class_="soft"), class_="tile")


def _finding_list(found: Sequence[_Merged]) -> Markup:
    if not found:
        return Markup("")
    items = [
        element(
            "li",
            f"{one.severity}: {one.sentence}",
            element("div", listed(pods, _MAX_NAMES), class_="soft"),
            element("div", one.advice(), class_="soft"),
            class_=_severity_class(one),
        )
        for one, pods in found
    ]
    return join([element("h2", "Findings"), element("ul", *items, class_="problems")])


def _severity_class(one: Finding) -> str:
    return "open" if Severity.of(one.severity) in (Severity.OPEN, Severity.BROKEN) else "part"


def _pods(report: AgentReport) -> Markup:
    columns: tuple[_Column[PodStatus], ...] = (
        ("pod", lambda pod: pod.full_name),
        ("mode", lambda pod: _word(pod.mode, _MODE_CLASSES.get(pod.mode, "part"))),
        ("isolation", lambda pod: _condition(pod, labels.ISOLATION_READY)),
        ("probes", lambda pod: _condition(pod, labels.PROBES_PASSING)),
        ("gates", lambda pod: ", ".join(gate.interface for gate in pod.gates) or "none"),
        ("path test", _paths),
        ("dropped", lambda pod: _by_reason(pod.gates, "drop")),
        ("would drop", lambda pod: _by_reason(pod.gates, "would-drop")),
    )
    concerned = {name for one in report.findings for name in one.pod_names}
    ordered = sorted(report.pods, key=lambda pod: pod.full_name not in concerned)
    return _section("Pods", "No pods.", columns, ordered)


def _probes(pods: Sequence[PodStatus]) -> Markup:
    columns: tuple[_Column[tuple[PodStatus, ProbeStatus]], ...] = (
        ("pod", lambda row: row[0].full_name),
        ("container", lambda row: row[1].container),
        ("probe", lambda row: f"{row[1].type.lower()} {row[1].handler}"),
        ("result", lambda row: _word(row[1].result, _STATE_CLASSES.get(row[1].result, "part"))),
        ("newest", lambda row: sparkline.draw(row[1].recent_ms)),
        ("response", lambda row: row[1].last_message[:_MAX_CHARACTERS]),
    )
    rows = [(pod, probe) for pod in pods for probe in pod.probes]
    rows.sort(key=lambda row: row[1].result == "success")
    return _section("Probes", "No probes.", columns, rows)


def _drops(drops: Drops, now: datetime.datetime) -> Markup:
    columns: tuple[_Column[SourceProcessStatus], ...] = (
        ("process", lambda source: source.process or "unknown"),
        ("source", lambda source: element("code", source.cgroup)),
        ("pod", lambda source: f"{source.namespace}/{source.pod}"),
        ("to", _target),
        ("mode", lambda source: _word(source.mode, _MODE_CLASSES.get(source.mode, "part"))),
        ("verdict", lambda source: source.verdict),
        ("now", lambda source: "admitted by a rule" if source.is_admitted else ""),
        ("packets", lambda source: source.packets),
        ("first", lambda source: _age(source.first, now)),
        ("last", lambda source: _age(source.last, now)),
    )
    shown = drops.sources[:_MAX_SOURCES]
    more = len(drops.sources) - len(shown)
    text = f"{more} more sources: see podgate drops." if more else ""
    table = _section("Drops by source", "No host process was dropped.", columns, shown)
    return join([table, element("p", text, class_="soft")])


def _relay(report: AgentReport) -> Markup:
    relay = report.relay
    words, kind = _relay_state(report)
    text = (
        f"{relay.connections} connections, {relay.held_syns} SYNs held, "
        f"{_count(relay.restarts, 'restart')}, {relay.unknown_address} to unknown addresses"
    )
    shown = element("p", _word(words, kind), f": {text}" if relay.is_up else "")
    columns: tuple[_Column[tuple[PodStatus, RelayedPortStatus]], ...] = (
        ("pod", lambda row: row[0].full_name),
        ("container", lambda row: row[1].container),
        ("probe", lambda row: row[1].handler),
        ("port", lambda row: row[1].port or "undeclared"),
        ("connections", lambda row: _reasons(row[1].outcomes)),
        ("mean", lambda row: "" if row[1].open_ms is None else f"{row[1].open_ms:.1f} ms"),
    )
    rows = [(pod, port) for pod in report.pods for port in pod.relayed]
    return join([element("h2", "Relay"), shown, _table(columns, rows) if rows else ""])


def _node(report: AgentReport) -> Markup:
    rows: list[tuple[str, Node]] = [
        ("default mode", f"{report.default_mode}, at most {report.max_mode}"),
        ("pods from", report.pod_source.pods_from),
        ("kubelet", element("code", report.kubelet or "not identified")),
        ("hooks", ", ".join(hook.name for hook in report.hooks if not hook.problem) or "none"),
        ("dropped before an interface is chosen", _reasons(report.node_drops) or "none"),
        ("raw sockets", report.raw_sockets.mode or "not checked"),
    ]
    columns: tuple[_Column[tuple[str, Node]], ...] = (
        ("setting", lambda row: row[0]),
        ("value", lambda row: row[1]),
    )
    return _section("Node", "", columns, rows)


def _section(
    title: str, without: str, columns: Sequence[_Column[Row]], rows: Sequence[Row]
) -> Markup:
    shown = _table(columns, rows) if rows else element("p", without, class_="soft")
    return join([element("h2", title), shown])


def _table(columns: Sequence[_Column[Row]], rows: Sequence[Row]) -> Markup:
    """On narrow screens each row is a card, and data-label names its cells."""
    head = element("thead", element("tr", *(element("th", name) for name, _ in columns)))
    body = element("tbody", *(_row(columns, row) for row in rows))
    return element("div", element("table", head, body), class_="scroll")


def _row(columns: Sequence[_Column[Row]], row: Row) -> Markup:
    cells = ((name, cell(row)) for name, cell in columns)
    return element(
        "tr",
        *(
            element(
                "td",
                value,
                data_label=name,
                class_="number" if isinstance(value, int) else "text",
            )
            for name, value in cells
        ),
    )


def _condition(pod: PodStatus, kind: str) -> Node:
    condition = next((each for each in pod.conditions if each.type == kind), None)
    if condition is None:
        return "none"
    if found := findings.kind_of(condition, pod.mode):
        return _word(condition.reason, "open" if found.severity is Severity.OPEN else "part")
    return _word(condition.reason, "part" if condition.reason in ("Audit", "Off") else "closed")


def _is_as_desired(pod: PodStatus) -> bool:
    """Whether the desired state is in force."""
    return any(
        one.type == labels.ISOLATION_READY and findings.kind_of(one, pod.mode) is None
        for one in pod.conditions
    )


def _paths(pod: PodStatus) -> Node:
    results = sorted({path.result for path in pod.paths})
    words = [_word(each, _STATE_CLASSES.get(each, "part")) for each in results]
    return join(words) if words else "none"


def _relay_state(report: AgentReport) -> tuple[str, str]:
    """A word, and its class."""
    for one in report.findings:
        if one.kind in (kinds.RELAY_MISSING.name, kinds.RELAY_MISSING_PROBES_FAIL.name):
            return "missing", _severity_class(one)
    return ("serving", "closed") if report.relay.is_up else ("not needed", "")


def _total(pods: Iterable[PodStatus], verdict: str) -> int:
    return sum(
        count
        for pod in pods
        for gate in pod.gates
        for reason, count in gate.packets.get(verdict, {}).items()
    )


def _by_reason(gates: Iterable[GateStatus], verdict: str) -> str:
    totals: collections.Counter[str] = collections.Counter()
    for gate in gates:
        totals.update(gate.packets.get(verdict, {}))
    return _reasons(totals) or "0"


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def _target(source: SourceProcessStatus) -> str:
    if source.has_many_ports:
        return f"{source.protocol} many ports"
    return f"{source.protocol} {source.port}" if source.port else source.protocol


def _word(text: str, kind: str) -> Markup:
    return element("span", text, class_=kind)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _time(at: datetime.datetime) -> str:
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _age(at: datetime.datetime, now: datetime.datetime) -> Markup:
    """As "5m ago", with the time as its title."""
    return element("span", ago(now - at), title=_time(at))

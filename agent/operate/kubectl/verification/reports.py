"""A run's report: as rows of a table, JSON, HTML and JUnit's XML."""

import html
from collections.abc import Iterable
from xml.sax.saxutils import quoteattr

from agent import VERSION
from agent.operate.kubectl.cluster import Object
from agent.operate.kubectl.printing import GREEN, RED, YELLOW, Cell
from agent.operate.kubectl.verification.results import HOLE, KUBELET_BLOCKED, Path, Report, Try
from agent.operate.kubectl.verification.tries import CLOSED, OPEN

HEADER = ("NODE", "POD", "MODE", "FAMILY", "TCP", "UDP", "ICMP", "KUBELET", "VERDICT")
_COLOURS = {HOLE: RED, KUBELET_BLOCKED: RED, OPEN: YELLOW, CLOSED: GREEN}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:70em}"
    "table{border-collapse:collapse}th,td{padding:.3em .8em;text-align:left;"
    "border-bottom:1px solid #ccc}.bad{background:#fdd}.open{background:#ffd}.good{background:#dfd}"
)
_CLASSES = {HOLE: "bad", KUBELET_BLOCKED: "bad", OPEN: "open", CLOSED: "good"}


def rows(report: Report) -> list[tuple[str | Cell, ...]]:
    """Of a table, with its header. TCP and UDP are of declared and of other ports."""
    return [HEADER] + [
        (*_cells(path), Cell(path.verdict, _COLOURS.get(path.verdict, 0))) for path in report.paths
    ]


def as_json(report: Report) -> Object:
    """All of it, as JSON's types."""
    return {
        "version": VERSION,
        "started": report.started,
        "ended": report.ended,
        "isWell": report.is_well,
        "hasHole": report.has_hole,
        "summary": report.sentences(),
        "nodes": [
            {"node": one.node, "origin": one.origin, "problems": list(one.problems)}
            for one in report.nodes
        ],
        "paths": [
            {
                "node": path.node,
                "namespace": path.target.namespace,
                "pod": path.target.name,
                "isCanary": path.target.is_canary,
                "mode": path.target.mode,
                "address": path.address,
                "family": path.family,
                "kubelet": _kubelet(path),
                "verdict": path.verdict,
                "tries": [
                    {
                        "protocol": one.port.protocol,
                        "port": one.port.number,
                        "isDeclared": one.port.is_declared,
                        "outcome": one.outcome,
                        "detail": one.detail,
                    }
                    for one in path.tries
                ],
            }
            for path in report.paths
        ],
    }


def as_html(report: Report) -> str:
    """One page without scripts or links, to be filed."""
    head = "".join(f"<th scope=col>{name.capitalize()}</th>" for name in HEADER)
    body = "".join(
        f"<tr class={_CLASSES.get(path.verdict, 'unclear')}>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in (*_cells(path), path.verdict))
        + "</tr>\n"
        for path in report.paths
    )
    sentences = "".join(f"<li>{html.escape(text)}</li>\n" for text in report.sentences())
    details = "".join(
        f"<tr><td>{html.escape(path.node)}</td><td>{html.escape(path.target.full_name)}</td>"
        f"<td>{html.escape(path.address)}</td><td>{html.escape(_port(one))}</td>"
        f"<td>{one.outcome}</td><td>{html.escape(one.detail)}</td></tr>\n"
        for path in report.paths
        for one in path.tries
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<title>podgate: isolation verified {report.ended}</title><style>{_STYLE}</style></head>\n"
        "<body><h1>Isolation of pods from their nodes</h1>\n"
        f"<p>podgate {VERSION}, {report.started} to {report.ended}.</p>\n<ul>\n{sentences}</ul>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"
        "<h2>Each try</h2>\n<table><thead><tr><th scope=col>Node</th><th scope=col>Pod</th>"
        "<th scope=col>Address</th><th scope=col>Port</th><th scope=col>Outcome</th>"
        f"<th scope=col>Detail</th></tr></thead><tbody>\n{details}</tbody></table>\n</body></html>"
    )


def as_junit(report: Report) -> str:
    """A suite for each node. A try fails where it finds a hole, and is skipped where the pod's mode
    leaves it open or nothing answers."""
    suites = []
    for node in report.nodes:
        cases = [case for path in node.paths for case in _cases(path)]
        cases += [
            f'<testcase classname={quoteattr(node.node)} name="tries">'
            f"<error message={quoteattr(problem)}/></testcase>"
            for problem in node.problems
        ]
        counts = {
            "tests": len(cases),
            "failures": sum("<failure" in case for case in cases),
            "errors": sum("<error" in case for case in cases),
            "skipped": sum("<skipped" in case for case in cases),
        }
        numbers = " ".join(f'{name}="{count}"' for name, count in counts.items())
        lines = "\n".join(f"    {case}" for case in cases)
        suites.append(
            f"  <testsuite name={quoteattr(node.node)} {numbers} "
            f'timestamp="{report.started}">\n{lines}\n  </testsuite>'
        )
    body = "\n".join(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n{body}\n</testsuites>'


def _cases(path: Path) -> Iterable[str]:
    of = quoteattr(f"{path.target.full_name} ({path.target.mode})")
    for one in path.tries:
        name = quoteattr(f"{path.family} {_port(one)}")
        found = ""
        message = quoteattr(f"{one.outcome}: {one.detail}")
        if one.outcome == OPEN and path.target.is_to_be_closed:
            found = f"<failure message={message}/>"
        elif one.outcome != CLOSED:
            found = f"<skipped message={message}/>"
        yield f"<testcase classname={of} name={name}>{found}</testcase>"
    if path.kubelet is not None:
        failed = "" if path.kubelet else '<failure message="the kubelet does not reach it"/>'
        yield f'<testcase classname={of} name="{path.family} kubelet">{failed}</testcase>'


def _cells(path: Path) -> tuple[str, ...]:
    return (
        *(path.node, path.target.full_name, path.target.mode, path.family),
        *(_outcomes(path, protocol) for protocol in ("TCP", "UDP", "ICMP")),
        _kubelet(path),
    )


def _outcomes(path: Path, protocol: str) -> str:
    """Of declared ports and of another one, such as "closed/open"; the worst of several."""
    declared, other = (
        [
            one.outcome
            for one in path.tries
            if (one.port.protocol, one.port.is_declared) == (protocol, is_declared)
        ]
        for is_declared in (True, False)
    )
    worst = [_worst(found) for found in (declared, other)]
    return worst[1] if protocol == "ICMP" else "/".join(worst)


def _worst(outcomes: list[str]) -> str:
    for outcome in (OPEN, "unclear", CLOSED):
        if outcome in outcomes:
            return outcome
    return "-"


def _kubelet(path: Path) -> str:
    return {None: "-", True: "passes", False: "fails"}[path.kubelet]


def _port(one: Try) -> str:
    if one.port.protocol == "ICMP":
        return "ICMP"
    return f"{one.port.protocol} {one.port.number}{' declared' if one.port.is_declared else ''}"

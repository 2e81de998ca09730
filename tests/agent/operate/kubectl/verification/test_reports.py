"""The same run as a table, JSON, a page and JUnit's XML."""

import html.parser
import json
import re
from xml.etree import ElementTree

from agent import VERSION
from agent.operate.kubectl import printing
from agent.operate.kubectl.printing import Cell
from agent.operate.kubectl.verification import reports
from agent.operate.kubectl.verification.results import NodeResult, Path, Report, Try
from agent.operate.kubectl.verification.targets import Port, Target

PORTS = (Port("TCP", 8080, is_declared=True), Port("TCP", 9), Port("UDP", 9), Port("ICMP", 0))


def path(mode: str, *outcomes: str, kubelet: bool | None = None, name: str = "web") -> Path:
    target = Target("shop", name, f"u-{name}", mode, ("198.18.0.9",), PORTS, kubelet)
    tries = tuple(Try(port, one, "why") for port, one in zip(PORTS, outcomes, strict=True))
    return Path("a", target, "198.18.0.9", tries, kubelet)


REPORT = Report(
    (
        NodeResult(
            "a",
            (
                path("enforce", "open", "closed", "closed", "closed", name="<hole>"),
                path("strict", "closed", "closed", "unclear", "closed", kubelet=True),
                path("strict", "closed", "closed", "closed", "closed", kubelet=False, name="slow"),
                path("audit", "open", "open", "open", "open", name="audited"),
                path("enforce", "unclear", "unclear", "unclear", "unclear", name="dead"),
            ),
        ),
        NodeResult("b", problems=('its canary "x" does not run: OutOfpods',)),
    ),
    "2026-11-22T10:00:00Z",
    "2026-11-22T10:00:09Z",
)


def test_table_has_the_worst_of_declared_and_other_ports() -> None:
    header, *rows = reports.rows(REPORT)
    assert header == reports.HEADER
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    assert [" ".join(row) for row in texts] == [
        "a shop/<hole> enforce IPv4 open/closed -/closed closed - HOLE",
        "a shop/web strict IPv4 closed/closed -/unclear closed passes closed",
        "a shop/slow strict IPv4 closed/closed -/closed closed fails kubelet blocked",
        "a shop/audited audit IPv4 open/open -/open open - open",
        "a shop/dead enforce IPv4 unclear/unclear -/unclear unclear - unclear",
    ]


def test_verdict_has_its_colour() -> None:
    cells = [row[-1] for row in reports.rows(REPORT)[1:]]
    assert cells == [
        *(Cell("HOLE", printing.RED), Cell("closed", printing.GREEN)),
        *(Cell("kubelet blocked", printing.RED), Cell("open", printing.YELLOW), Cell("unclear")),
    ]


def test_sentences_have_the_worst_first() -> None:
    assert REPORT.sentences() == [
        "Hole open: host processes reach 1 pod that should be closed, on a: shop/<hole>.",
        "The kubelet does not reach 1 pod: shop/slow.",
        'b: its canary "x" does not run: OutOfpods.',
        "Closed: host processes of a reach no address of 1 pod.",
        "Open, as modes off and audit are: 1 pod on a.",
        "Unclear, since nothing answers there: shop/dead.",
    ]


def test_json_has_each_try() -> None:
    found = json.loads(json.dumps(reports.as_json(REPORT)))
    first, *_ = found.pop("paths")
    assert first == {
        **{"node": "a", "namespace": "shop", "pod": "<hole>", "isCanary": False},
        **{"mode": "enforce", "address": "198.18.0.9", "family": "IPv4", "kubelet": "-"},
        "verdict": "HOLE",
        "tries": [
            {
                **{"protocol": port.protocol, "port": port.number, "isDeclared": port.is_declared},
                **{"outcome": outcome, "detail": "why"},
            }
            for port, outcome in zip(PORTS, ("open", "closed", "closed", "closed"), strict=True)
        ],
    }
    assert found == {
        "version": VERSION,
        **{"started": REPORT.started, "ended": REPORT.ended},
        **{"isWell": False, "hasHole": True, "summary": REPORT.sentences()},
        "nodes": [
            {"node": "a", "origin": "pod", "problems": []},
            {
                **{"node": "b", "origin": "pod"},
                "problems": ['its canary "x" does not run: OutOfpods'],
            },
        ],
    }


def test_junit_fails_for_the_hole_the_kubelet_and_nodes_that_were_not_tried() -> None:
    root = ElementTree.fromstring(reports.as_junit(REPORT))
    first, second = root.findall("testsuite")
    assert first.attrib | {"timestamp": ""} == {
        **{"name": "a", "tests": "22", "failures": "2", "errors": "0", "skipped": "9"},
        "timestamp": "",
    }
    failed = [one.attrib for one in first if one.find("failure") is not None]
    assert failed == [
        {"classname": "shop/<hole> (enforce)", "name": "IPv4 TCP 8080 declared"},
        {"classname": "shop/slow (strict)", "name": "IPv4 kubelet"},
    ]
    assert (second.attrib["tests"], second.attrib["errors"]) == ("1", "1")
    (case,) = second
    assert case.attrib == {"classname": "b", "name": "tries"}
    skipped = [
        (one.attrib["classname"], one.attrib["name"], found.attrib["message"])
        for one in first
        if (found := one.find("skipped")) is not None
    ]
    ports = ("TCP 8080 declared", "TCP 9", "UDP 9", "ICMP")
    assert skipped == [
        ("shop/web (strict)", "IPv4 UDP 9", "unclear: why"),
        *(("shop/audited (audit)", f"IPv4 {port}", "open: why") for port in ports),
        *(("shop/dead (enforce)", f"IPv4 {port}", "unclear: why") for port in ports),
    ]
    hole = next(one for one in first.iter("failure"))
    assert hole.attrib == {"message": "open: why"}


def test_page_is_whole_and_names_are_text() -> None:
    page = reports.as_html(REPORT)
    assert "shop/&lt;hole&gt;" in page
    assert "<hole>" not in page
    assert "<script" not in page
    opened: list[str] = []

    class Balanced(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balanced().feed(page)
    assert opened == []
    rows = re.findall(r"<tr class=(\w+)><td>a</td><td>([^<]+)</td>", page)
    assert rows == [
        *(("bad", "shop/&lt;hole&gt;"), ("good", "shop/web"), ("bad", "shop/slow")),
        *(("open", "shop/audited"), ("unclear", "shop/dead")),
    ]
    tries = re.findall(r"<td>198\.18\.0\.9</td><td>([^<]+)</td><td>(\w+)</td>", page)
    assert tries[:4] == [
        *(("TCP 8080 declared", "open"), ("TCP 9", "closed")),
        *(("UDP 9", "closed"), ("ICMP", "closed")),
    ]
    assert len(tries) == 20

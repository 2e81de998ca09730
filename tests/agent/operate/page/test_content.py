"""The status page: problems first, no text becomes markup, and strangers read no name."""

import datetime
import itertools
import re

import pytest

from agent.admin.report import (
    GateStatus,
    HookStatus,
    PathStatus,
    RawSocketStatus,
    RelayedPortStatus,
)
from agent.labels import ISOLATION_READY, PROBES_PASSING
from agent.operate.page import content, style
from agent.pods.modes import INVALID
from agent.pods.pod import Problem
from tests.agent.operate.page.html import Element, parse
from tests.agent.operate.page.reports import (
    NOW,
    condition,
    drops,
    pod,
    probe,
    relay,
    report,
    source,
)

HOSTILE = "<script>alert(1)</script>"


def full(*arguments: object, **fields: object) -> Element:
    return parse(content.full_page(report(*arguments, **fields), drops(source()), now=NOW))  # type: ignore[arg-type]


def section(page: Element, title: str) -> Element:
    """The table after a heading."""
    main = next(page.all("main"))
    names = [child.text if child.name == "h2" else "" for child in main.children]
    return main.children[names.index(title) + 1]


def rows(page: Element, title: str) -> list[dict[str, str]]:
    """Cells of a table by their column."""
    body = next(section(page, title).all("tbody"))
    return [
        {cell.attributes["data-label"]: cell.text for cell in row.children} for row in body.children
    ]


def test_pod_has_its_mode_state_gates_and_drops() -> None:
    (shown,) = rows(full(pod()), "Pods")
    assert shown == {
        "pod": "shop/web",
        "mode": "enforce",
        "isolation": "Enforced",
        "probes": "ProbesPassing",
        "gates": "veth1",
        "path test": "confirmed",
        "dropped": "4 node",
        "would drop": "0",
    }


def test_drops_are_listed_by_source_with_their_age() -> None:
    (shown,) = rows(full(pod()), "Drops by source")
    assert shown == {
        **{"process": "curl", "source": "/system.slice/backup.service", "pod": "shop/web"},
        **{"to": "tcp 8080", "mode": "enforce", "verdict": "", "now": "", "packets": "12"},
        **{"first": "2h ago", "last": "5m ago"},
    }
    (row,) = next(section(full(pod()), "Drops by source").all("tbody")).children
    assert [cell.attributes["class"] for cell in row.children] == [
        *["text"] * 7,
        "number",
        *["text"] * 2,
    ]
    times = [span.attributes["title"] for span in row.all("span") if "title" in span.attributes]
    assert times == ["2026-11-22 16:00:00 UTC", "2026-11-22 17:55:00 UTC"]


def test_drops_have_the_verdict_of_then_and_what_is_admitted_now() -> None:
    found = drops(source(verdict="would-drop", is_admitted=True), source(verdict="drop"))
    shown = rows(parse(content.full_page(report(pod()), found, now=NOW)), "Drops by source")
    assert [(one["verdict"], one["now"]) for one in shown] == [
        ("would-drop", "admitted by a rule"),
        ("drop", ""),
    ]


def test_probe_has_a_bar_for_each_of_its_newest_results() -> None:
    page = full(pod(probes=[probe(recent_ms=[1.0, 4.0, None, 2.0])]))
    chart = section(page, "Probes").with_class("spark")[0]
    assert {path.attributes["class"]: path.attributes["d"] for path in chart.all("path")} == {
        "passed": "M0 15h3v5h-3zM4 0h3v20h-3zM12 10h3v10h-3z",
        "failed": "M8 0h3v20h-3z",
    }
    size = {name: chart.attributes[name] for name in ("width", "height", "viewbox")}
    assert size == {"width": "16", "height": "20", "viewbox": "0 0 16 20"}
    assert next(chart.all("title")).text == "4 probes, slowest 4.0 ms, 1 failed"


def test_probe_without_results_has_no_chart() -> None:
    assert not full(pod(probes=[probe(recent_ms=[])])).with_class("spark")


def test_findings_are_first_and_red_if_something_is_open_or_broken() -> None:
    bypassed = pod("web", paths=[PathStatus(address="198.18.1.1", result="bypassed")])
    unready = pod("api", conditions=[condition(PROBES_PASSING, "False", "ProbeFailing", "503")])
    missing = relay(is_up=False, problem="no netns", has_fallback=False)
    page = full(unready, bypassed, relay=missing)
    assert next(page.all("h2")).text == "Findings"
    items = section(page, "Findings").all("li")
    assert [(item.attributes["class"], item.text.partition(":")[0]) for item in items] == [
        ("open", "open"),
        ("open", "broken"),
        ("part", "degraded"),
        ("part", "note"),
    ]


def test_finding_of_many_pods_is_one_item() -> None:
    pods = [pod(f"web-{number}", existing_flows=1) for number in range(10)]
    (item,) = section(full(*pods), "Findings").all("li")
    assert "shop/web-0" in item.text
    assert "and 2 more" in item.text


def test_pods_with_problems_are_above_others() -> None:
    broken = pod("zoo", conditions=[condition(ISOLATION_READY, "False", "GateFailed", "no room")])
    assert [row["pod"] for row in rows(full(pod("a"), broken), "Pods")] == ["shop/zoo", "shop/a"]


def test_page_without_findings_shows_that() -> None:
    page = full(pod())
    assert page.with_class("state")[0].text == "no findings"
    assert "Findings" not in [heading.text for heading in page.all("h2")]


def in_colour(page: Element, kind: str) -> set[str]:
    """All words and numbers of the page in the colour of a state."""
    return {each.text for each in page.all() if each.attributes.get("class", "").endswith(kind)}


def test_open_states_are_red_and_what_is_not_as_desired_is_yellow() -> None:
    modes = {"off": "Off", "audit": "Audit", "enforce": "Enforced", "strict": "Strict"}
    paths = [PathStatus(address="198.18.1.1", result=each) for each in ("bypassed", "unreachable")]
    pods = [
        *(
            pod(mode, mode=mode, conditions=[condition(ISOLATION_READY, "True", reason)])
            for mode, reason in modes.items()
        ),
        pod("x", conditions=[condition(ISOLATION_READY, "False", "GateFailed")], paths=paths),
        pod(
            "y",
            conditions=[condition(PROBES_PASSING, "False", "ProbeFailing")],
            probes=[probe(result="failure")],
        ),
        pod("z", mode="later"),
        pod("lost", conditions=[condition(ISOLATION_READY, "True", "GateLost")]),
    ]
    sources = drops(source(mode="other"))
    page = parse(content.full_page(report(*pods, kubelet=None), sources, now=NOW))
    colours = {kind: in_colour(page, kind) for kind in ("open", "part", "closed")}
    assert {"off", "bypassed", "GateFailed", "GateLost", "5 findings"} <= colours["open"]
    assert {
        "audit",
        "Audit",
        "Off",
        "unreachable",
        "failure",
        "ProbeFailing",
        "later",
        "other",
    } <= (colours["part"])
    assert {"enforce", "strict", "Enforced", "Strict", "confirmed", "success", "serving"} <= (
        colours["closed"]
    )
    shared = [left & right for left, right in itertools.combinations(colours.values(), 2)]
    # Numbers of tiles: as many pods are off as are in audit, or in strict.
    assert shared == [{"1"}] * 3


@pytest.mark.parametrize(
    ("fields", "tile", "kind"),
    [
        ({"kubelet": None}, "not identified kubelet", "part"),
        ({}, "identified kubelet", "closed"),
        ({}, "serving relay", "closed"),
        ({"relay": relay(is_up=False)}, "not needed relay", ""),
        ({"relay": relay(is_up=False, problem="none starts")}, "missing relay", "part"),
        (
            {"relay": relay(is_up=False, problem="none starts", has_fallback=False)},
            "missing relay",
            "open",
        ),
    ],
)
def test_tile_has_the_colour_of_its_state(fields: dict[str, object], tile: str, kind: str) -> None:
    (shown,) = (each for each in full(pod(), **fields).with_class("tile") if each.text == tile)
    assert shown.children[0].attributes["class"] == kind


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "state closed"),
        ({"is_synced": False}, "state part"),
        ({"is_synced": False, "open_ports": "They are open."}, "state open"),
    ],
)
def test_head_has_the_colour_of_the_worst_finding(fields: dict[str, object], kind: str) -> None:
    (state,) = full(pod(), **fields).with_class("state")
    assert state.attributes["class"] == kind


def test_text_of_others_is_never_markup() -> None:
    hostile = pod(
        HOSTILE,
        namespace='"><img src=x onerror=alert(1)>',
        mode_problems=[Problem(INVALID, HOSTILE)],
        conditions=[condition(ISOLATION_READY, "False", HOSTILE, HOSTILE)],
        gates=[GateStatus(interface=HOSTILE, ifindex=1, packets={"drop": {HOSTILE: 1}})],
        probes=[probe(container=HOSTILE, handler=HOSTILE, last_message=HOSTILE, result=HOSTILE)],
    )
    page = parse(
        content.full_page(
            report(hostile, kubelet=HOSTILE, version=HOSTILE),
            drops(source(process=HOSTILE, cgroup="/'><svg/onload=alert(1)>", pod=HOSTILE)),
            now=NOW,
        )
    )
    names = {element.name for element in page.all()}
    assert not names & {"script", "img", "iframe", "a", "form", "link"}
    assert {a for e in page.all() for a in e.attributes} <= {
        "charset", "class", "content", "d", "data-label", "height", "http-equiv", "lang", "name",
        "role", "title", "viewbox", "width",
    }  # fmt: skip
    assert HOSTILE in page.text  # as text


@pytest.mark.parametrize("text", ["a\u202eb", "a\x1b[31mb", "a\x00b", "a\udc80b", "a\u2066b"])
def test_characters_that_hide_text_are_replaced(text: str) -> None:
    page = parse(content.full_page(report(), drops(source(process=text)), now=NOW))
    assert rows(page, "Drops by source")[0]["process"].startswith("a\ufffd")


def test_public_page_has_counts_and_no_names() -> None:
    secret = pod(
        "payroll",
        namespace="finance",
        mode_problems=[Problem(INVALID, "The label of finance/payroll is no mode.")],
        gates=[GateStatus(interface="vethpay", ifindex=3, packets={"drop": {"node": 9}})],
        probes=[probe(last_message="secret answer")],
    )
    given = report(secret, kubelet="/system.slice/kubelet.service", max_mode_from="finance")
    page = content.public_page(given, now=NOW)
    for name in (b"payroll", b"finance", b"vethpay", b"secret", b"kubelet.service", b"1.2.3"):
        assert name not in page
    tiles = [tile.text for tile in parse(page).with_class("tile")]
    assert "1 pods" in tiles
    assert "9 dropped" in tiles
    assert parse(page).with_class("state")[0].text == "1 finding"


@pytest.mark.parametrize("has_names", [False, True])
def test_page_needs_nothing_from_elsewhere(has_names: bool) -> None:
    page = full(pod()) if has_names else parse(content.public_page(report(pod()), now=NOW))
    assert not [e for e in page.all() if {"src", "href", "style", "onclick"} & e.attributes.keys()]
    assert not list(page.all("script"))
    assert "url(" not in style.CSS
    assert "@import" not in style.CSS


def test_style_sheet_is_for_light_dark_and_narrow_screens() -> None:
    assert "prefers-color-scheme:dark" in style.CSS
    assert "max-width:44rem" in style.CSS


def test_relay_shows_the_kubelets_connections_to_each_port() -> None:
    ports = [
        RelayedPortStatus(
            container="app",
            handler="http :8080/healthz",
            port=8080,
            last_outcome="accepted",
            outcomes={"accepted": 7, "rejected": 1},
            open_ms=0.25,
        )
    ]
    page = full(pod(relayed=ports))
    assert "2 connections, 0 SYNs held, 1 restart" in section(page, "Relay").text
    (cells,) = next(page.all("main")).children[-4].all("tbody")
    assert [cell.text for cell in cells.all("td")] == [
        "shop/web",
        "app",
        "http :8080/healthz",
        "8080",
        "7 accepted, 1 rejected",
        "0.2 ms",
    ]


def test_many_sources_are_cut_to_the_busiest() -> None:
    sources = [source(process=f"p{number}", packets=1000 - number) for number in range(300)]
    page = parse(content.full_page(report(), drops(*sources), now=NOW))
    shown = [row["process"] for row in rows(page, "Drops by source")]
    assert (shown[0], shown[-1], len(shown)) == ("p0", "p99", 100)
    assert "200 more sources: see podgate drops." in page.text


def test_white_space_of_a_response_is_no_hidden_character() -> None:
    (shown,) = rows(full(pod(probes=[probe(last_message="ok\r\n\tfine")])), "Probes")
    assert shown["response"] == "ok fine"


def test_empty_node_has_a_page() -> None:
    page = parse(
        content.full_page(
            report(relay=relay(is_up=False)), drops(), now=NOW + datetime.timedelta(1)
        )
    )
    assert "No pods." in page.text
    assert "No host process was dropped." in page.text


def test_failing_probes_are_above_successful_ones() -> None:
    of_pods = pod(probes=[probe(result="success"), probe(result="failure")])
    assert [row["result"] for row in rows(full(of_pods), "Probes")] == ["failure", "success"]


def test_probe_has_its_container_kind_and_response() -> None:
    found = probe(type="Liveness", handler="tcp :5432", result="failure", last_message="x" * 300)
    (shown,) = rows(full(pod(probes=[found])), "Probes")
    assert shown["pod"] == "shop/web"
    assert shown["container"] == "app"
    assert shown["probe"] == "liveness tcp :5432"
    assert shown["response"] == "x" * 200


def test_drop_may_lack_a_process_and_a_port() -> None:
    found = drops(
        source(process="", port=0, protocol="icmp", mode="audit"), source(has_many_ports=True)
    )
    page = parse(content.full_page(report(pod()), found, now=NOW))
    first, second = rows(page, "Drops by source")
    assert (first["process"], first["to"], first["mode"]) == ("unknown", "icmp", "audit")
    assert second["to"] == "tcp many ports"


def test_as_many_sources_as_there_is_room_for_are_all() -> None:
    page = parse(content.full_page(report(), drops(*[source()] * 100), now=NOW))
    assert "more sources" not in page.text


def test_drops_of_all_gates_of_a_pod_are_added_up_by_reason() -> None:
    gates = [
        GateStatus(interface="veth1", ifindex=7, packets={"drop": {"node": 4, "stray": 1}}),
        GateStatus(interface="veth2", ifindex=8, packets={"drop": {"node": 5}, "would-drop": {}}),
    ]
    page = full(pod(gates=gates), pod("bare", gates=[], paths=[], conditions=[]))
    # What is not as desired is first.
    second, first = rows(page, "Pods")
    assert (first["gates"], first["dropped"]) == ("veth1, veth2", "9 node, 1 stray")
    assert first["would drop"] == "0"
    assert (second["gates"], second["path test"], second["isolation"]) == ("none", "none", "none")


def test_tiles_count_what_the_node_has() -> None:
    gates = [
        GateStatus(
            interface="v", ifindex=1, packets={"drop": {"node": 4}, "would-drop": {"node": 2}}
        )
    ]
    pods = [
        pod("a", gates=gates * 2),
        pod("b", mode="audit", gates=[], conditions=[condition(ISOLATION_READY, "True", "Audit")]),
        pod("c", gates=[], conditions=[condition(ISOLATION_READY, "False", "GateFailed")]),
        pod("d", gates=[], conditions=[]),
    ]
    tiles = [tile.text for tile in full(*pods).with_class("tile")]
    assert tiles == [
        *("4 pods", "1 audit", "3 enforce", "2 of 4 as desired", "2 gates"),
        *("8 dropped", "4 would drop", "serving relay", "identified kubelet"),
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            {
                "default mode": "audit, at most strict",
                "pods from": "the API server",
                "kubelet": "/system.slice/kubelet.service",
                "hooks": "connect4",
                "dropped before an interface is chosen": "none",
                "raw sockets": "audit",
            },
        ),
        (
            {
                "kubelet": None,
                "hooks": [HookStatus(name="connect4", problem="taken")],
                "node_drops": {"raw": 2, "tunnel": 1},
                "raw_sockets": RawSocketStatus(mode="", problem="", sources=[]),
            },
            {
                "kubelet": "not identified",
                "hooks": "none",
                "dropped before an interface is chosen": "2 raw, 1 tunnel",
                "raw sockets": "not checked",
            },
        ),
    ],
)
def test_node_has_its_settings(fields: dict[str, object], expected: dict[str, str]) -> None:
    shown = {row["setting"]: row["value"] for row in rows(full(pod(), **fields), "Node")}
    assert shown | expected == shown


def test_relayed_port_may_be_undeclared_and_without_a_time() -> None:
    port = RelayedPortStatus(
        container="app", handler="", port=0, last_outcome="", outcomes={}, open_ms=None
    )
    (cells,) = next(full(pod(relayed=[port])).all("main")).children[-4].all("tbody")
    assert [cell.text for cell in cells.all("td")][3:] == ["undeclared", "", ""]


def test_relay_that_is_not_needed_has_no_numbers() -> None:
    page = full(pod(), relay=relay(is_up=False))
    assert section(page, "Relay").text == "not needed"


def test_advice_follows_each_finding() -> None:
    (item,) = section(full(pod(), kubelet=None), "Findings").all("li")
    (finding,) = report(pod(), kubelet=None).findings
    assert item.text.startswith(f"{finding.severity}: {finding.sentence}")
    assert finding.advice()
    assert item.text.endswith(finding.advice())


def test_probes_that_took_no_time_have_bars_of_full_height() -> None:
    page = full(pod(probes=[probe(recent_ms=[0.0, 0.0])]))
    chart = section(page, "Probes").with_class("spark")[0]
    (path,) = chart.all("path")
    assert re.findall(r"v(\d+)", path.attributes["d"]) == ["20", "20"]


def test_page_has_its_head_sections_and_foot() -> None:
    page = full(pod(), relay=relay(is_up=False))
    main = next(page.all("main"))
    shown = [(one.name, one.attributes.get("class", ""), one.text) for one in main.children]
    assert [one for one in shown if one[0] in ("header", "h2", "p", "footer")] == [
        (
            *("header", ""),
            "podgate 1.2.3 no findings since 2026-11-22 15:00:00 UTC, programs attached by tcx",
        ),
        *(("h2", "", "Pods"), ("h2", "", "Probes"), ("h2", "", "Drops by source")),
        *(("p", "soft", ""), ("h2", "", "Relay"), ("p", "", "not needed"), ("h2", "", "Node")),
        ("footer", "", "Loads again every 10 s. As of 2026-11-22 18:00:00 UTC."),
    ]
    assert [one.attributes for one in page.all("meta")] == [
        {"charset": "utf-8"},
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
        {"http-equiv": "refresh", "content": "10"},
        {"name": "robots", "content": "noindex"},
    ]


def test_public_page_is_head_tiles_and_foot() -> None:
    page = parse(content.public_page(report(pod()), now=NOW))
    assert [(one.name, one.text) for one in next(page.all("main")).children] == [
        ("header", "podgate no findings"),
        (
            "div",
            "1 pods 1 enforce 1 of 1 as desired 1 gates 4 dropped 0 would drop serving relay "
            "identified kubelet",
        ),
        (
            "footer",
            "Names of pods and processes, and problems in words, need the rights to read /metrics. "
            "As of 2026-11-22 18:00:00 UTC.",
        ),
    ]

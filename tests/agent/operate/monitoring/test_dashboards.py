"""Dashboards show metrics that exist, and name what their panels need."""

import itertools
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml

from agent.operate.monitoring.alerts import ALERTS
from agent.operate.monitoring.dashboards import DASHBOARDS
from agent.operate.monitoring.on_call import ON_CALL
from agent.operate.monitoring.panels import Dashboard, Stat
from agent.operate.monitoring.recordings import RECORDINGS
from agent.settings import MetricsLevel
from tests.agent.operate.monitoring import families

PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"
_COLUMNS = 24


@pytest.fixture(scope="module")
def declared() -> set[str]:
    return families.declared()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_metrics_exist(dashboard: Dashboard, declared: set[str]) -> None:
    expressions = [query.expression for query in dashboard.queries()]
    assert expressions
    assert [found for one in expressions if (found := families.unknown(one, declared))] == []


def test_unknown_metrics_would_be_found(declared: set[str]) -> None:
    wrong = {"podgate_no_such_total", "cluster:podgate_no_such:sum"}
    assert families.unknown(f"rate({'[5m]) + rate('.join(sorted(wrong))})", declared) == wrong


def test_expressions_can_be_parsed(tmp_path: pathlib.Path) -> None:
    """As recording rules, since promtool parses those."""
    queries = itertools.chain.from_iterable(one.queries() for one in DASHBOARDS)
    rules = [{"record": f"panel:{i}", "expr": one.expression} for i, one in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run(
        (PROMTOOL, "check", "rules", "--lint=none", str(path)), capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_descriptions_name_the_level_of_metrics_that_panels_need() -> None:
    partial = [one.name for one in RECORDINGS if MetricsLevel.NODE not in one.levels]
    silent = [
        panel.title
        for dashboard in DASHBOARDS
        for panel in dashboard.shown
        if any(name in query.expression for query in panel.queries for name in partial)
        and "Needs --metrics=namespace or pod." not in panel.description
    ]
    assert silent == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_figures_are_the_first_row_and_no_panels_overlap(dashboard: Dashboard) -> None:
    shown: list[dict[str, Any]] = dashboard.document()["panels"]
    assert [one["id"] for one in shown] == list(range(1, len(shown) + 1))
    first = [one for one in shown if one["gridPos"]["y"] == 0]
    assert {one["type"] for one in first} == {"stat"}
    assert sum(one["gridPos"]["w"] for one in first) == _COLUMNS
    cells = [
        (x, y)
        for place in (one["gridPos"] for one in shown)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < _COLUMNS


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_variables_of_expressions_exist(dashboard: Dashboard) -> None:
    document = dashboard.document()
    variables = {one["name"]: one for one in document["templating"]["list"]}
    used = {
        name
        for name in ("cluster", "instance", "runbooks")
        if f"${name}" in dashboard.content() or f"${{{name}}}" in dashboard.content()
    }
    assert used | {"datasource"} == variables.keys()
    # Targets may lack the label cluster; the kubelet has probes of the same name.
    assert variables["cluster"]["allValue"] == ".*"
    assert "allValue" not in variables.get("instance", {})


def test_who_is_on_call_finds_the_runbook_of_each_alert() -> None:
    (text,) = (one for one in ON_CALL.document()["panels"] if one["type"] == "text")
    content = text["options"]["content"]
    assert [one.name for one in ALERTS if f"]($runbooks/{one.name}.md)" not in content] == []
    (linked,) = (one for one in ON_CALL.panels if one.link)
    assert linked.link == ("Runbook", "${runbooks}/${__field.labels.alertname}.md")


@pytest.mark.parametrize(
    ("stat", "colours"),
    [
        (Stat("s", "", "short", "x"), {0.0: "text", 9.0: "text"}),
        (Stat("s", "", "short", "x", red_above=0), {0.0: "green", 1.0: "red"}),
        (Stat("s", "", "short", "x", red_below=1), {0.5: "red", 1.0: "green"}),
    ],
)
def test_figures_are_red_where_something_is_to_do(stat: Stat, colours: dict[float, str]) -> None:
    dashboard = Dashboard("d", "d", (stat,), ())
    (shown,) = dashboard.document()["panels"]
    steps = shown["fieldConfig"]["defaults"]["thresholds"]["steps"]
    for value, colour in colours.items():
        reached = [one["color"] for one in steps if one["value"] is None or one["value"] <= value]
        assert reached[-1] == colour
        assert stat.is_red(value) == (colour == "red")

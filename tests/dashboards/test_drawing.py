"""The drawing of dashboards: every panel is drawn, and texts cannot break the picture."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from agent.operate.monitoring.dashboards import ISOLATION
from tests.dashboards import drawing
from tests.dashboards.prometheus import Series


def texts(content: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(content).iter() if one.text]


def test_each_panel_has_its_title_and_its_series_or_no_data() -> None:
    stats: list[Series] = [{} for _ in ISOLATION.stats]
    found: list[Series] = [{} for _ in ISOLATION.panels]
    found[0] = {f"series {i} <&>": [(0.0, 1.0), (1.0, i)] for i in range(8)}
    shown = texts(drawing.picture(ISOLATION, stats, found))
    for panel in ISOLATION.shown:
        assert panel.title in shown
    assert shown.count("No data") == len(ISOLATION.stats) + len(ISOLATION.panels) - 1
    assert "series 7 <&> 7" in shown
    assert "and 2 more" in shown


def test_figures_are_the_last_value_and_red_where_something_is_to_do() -> None:
    stats: list[Series] = [{stat.title: [(0.0, 7.0), (1.0, 0.25)]} for stat in ISOLATION.stats]
    stats[0] = {"nodes": [(0.0, 7.0), (1.0, math.nan)]}
    content = drawing.picture(ISOLATION, stats, [{} for _ in ISOLATION.panels])
    figures = [
        one for one in ElementTree.fromstring(content).iter() if one.get("font-size") == "27"
    ]
    assert [(one.text, one.get("fill")) for one in figures] == [
        ("No data", "#888"),
        ("0.25", "#24292e"),
        ("25 %", "#24292e"),
        ("0.25", "#e02f44"),
        ("0.25 p/s", "#e02f44"),
        ("0.25 p/s", "#24292e"),
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (0.0051, "s", "5.1 ms"),
        (12.3, "short", "12.3"),
        (98_100_000, "bytes", "98.1 MB"),
        (0.5, "percentunit", "50 %"),
        (3.94, "pps", "3.94 p/s"),
        (0.02, "short", "0.02"),
    ],
)
def test_amounts_have_three_digits_and_their_unit(value: float, unit: str, text: str) -> None:
    assert drawing.amount(value, unit) == text

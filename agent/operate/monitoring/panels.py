"""Dashboards as Grafana's JSON: a row of figures, and below it panels in two columns.

A panel is a time series of at most three expressions. `$datasource` is the Prometheus, `$cluster`
the label that some add to their targets, and `$instance` a node.
"""

import dataclasses
import json
from typing import Any

_COLUMNS = 24
_HEIGHT, _WIDTH = 8, 12
_STAT_HEIGHT = 4
# The version of Grafana's dashboard model in which time series panels have these fields.
_SCHEMA = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LINKS = {
    **{"type": "dashboards", "tags": ["podgate"], "title": "podgate", "asDropdown": False},
    **{"includeVars": True, "keepTime": True},
}
_MOST = 20
# Found by the one metric that each agent has.
_FOUND_BY = "podgate_build_info"
OF_CLUSTER = 'cluster=~"$cluster"'
OF_NODE = f'{OF_CLUSTER},instance=~"$instance"'
"""What each expression of a dashboard selects."""
RUNBOOKS = "$runbooks"
"""Where runbooks are served: a variable that the user sets, or the chart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One expression. legend: of its series, with Grafana's templates."""

    expression: str
    legend: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """One figure: the last value of an expression of one series.

    red_above, red_below: where it is something to act on; None: never.
    """

    title: str
    description: str
    unit: str
    expression: str
    red_above: float | None = None
    red_below: float | None = None

    @property
    def queries(self) -> tuple[Query, ...]:
        return (Query(self.expression, self.title),)

    def is_red(self, value: float) -> bool:
        """Whether a user has to act."""
        is_above = self.red_above is not None and value > self.red_above
        return is_above or (self.red_below is not None and value < self.red_below)


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time. description: what is normal; unit: one of Grafana's; link: of each line, a
    title and an address with Grafana's templates."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    link: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. uid: stable, for links; also the file's name; notes: Markdown below the
    panels, under its title; is_by_node: whether users choose nodes; has_runbooks: whether
    something links to runbooks."""

    uid: str
    title: str
    stats: tuple[Stat, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, str] | None = None
    is_by_node: bool = True
    has_runbooks: bool = False

    @property
    def shown(self) -> list[Stat | Panel]:
        """All that has expressions."""
        return [*self.stats, *self.panels]

    def queries(self) -> list[Query]:
        """Of all its figures and panels."""
        return [query for one in self.shown for query in one.queries]

    def document(self) -> dict[str, Any]:
        """As Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["podgate"],
            "links": [_LINKS],
            "schemaVersion": _SCHEMA,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": self._variables()},
            "panels": self._panels(),
        }

    def content(self) -> str:
        return json.dumps(self.document(), indent=1) + "\n"

    def _variables(self) -> list[dict[str, Any]]:
        # Any, so that targets without this label count as well.
        cluster = {**_label_variable("cluster", "Cluster", _FOUND_BY), "allValue": ".*"}
        found = [_datasource_variable(), cluster]
        if self.is_by_node:
            # All agents, and not the kubelet and others, which have some of these metrics.
            where = f"{_FOUND_BY}{{{OF_CLUSTER}}}"
            found.append(_label_variable("instance", "Node", where))
        if self.has_runbooks:
            found.append(_runbooks_variable())
        return found

    def _panels(self) -> list[dict[str, Any]]:
        width = _COLUMNS // len(self.stats)
        made = [
            _stat(one, {"h": _STAT_HEIGHT, "w": width, "x": i * width, "y": 0})
            for i, one in enumerate(self.stats)
        ]
        for i, panel in enumerate(self.panels):
            y = _STAT_HEIGHT + i // 2 * _HEIGHT
            made.append(_panel(panel, {"h": _HEIGHT, "w": _WIDTH, "x": i % 2 * _WIDTH, "y": y}))
        if self.notes:
            y = _STAT_HEIGHT + (len(self.panels) + 1) // 2 * _HEIGHT
            made.append(_text(*self.notes, {"h": _HEIGHT, "w": _COLUMNS, "x": 0, "y": y}))
        return [{"id": i + 1, **one} for i, one in enumerate(made)]


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _label_variable(name: str, label: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _runbooks_variable() -> dict[str, Any]:
    """The path in this repository, which the chart replaces by the value runbookUrl."""
    path = "docs/runbooks"
    return {
        "name": RUNBOOKS.removeprefix("$"),
        "label": "Runbooks at",
        "type": "textbox",
        "query": path,
        "current": {"text": path, "value": path},
    }


def _stat(stat: Stat, place: dict[str, int]) -> dict[str, Any]:
    """Steps of thresholds are in ascending order; the first one has no value."""
    steps: list[dict[str, Any]] = [{"color": "green" if _has_limit(stat) else "text"}]
    if stat.red_below is not None:
        steps = [{"color": "red"}, {"color": "green", "value": stat.red_below}]
    if stat.red_above is not None:
        # Grafana's steps begin at their value; what is counted is 0 or far above this.
        steps.append({"color": "red", "value": stat.red_above + 0.001})
    steps[0]["value"] = None
    return {
        "type": "stat",
        "title": stat.title,
        "description": stat.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": stat.unit,
                "thresholds": {"mode": "absolute", "steps": steps},
                "color": {"mode": "thresholds"},
            },
            "overrides": [],
        },
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            **{"colorMode": "value", "graphMode": "area", "textMode": "value"},
        },
        "targets": _targets(stat.queries),
    }


def _has_limit(stat: Stat) -> bool:
    return stat.red_above is not None or stat.red_below is not None


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.link:
        title, address = panel.link
        defaults["links"] = [{"title": title, "url": address, "targetBlank": True}]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi"},
        },
        "targets": _targets(panel.queries),
    }


def _text(title: str, content: str, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "text",
        "title": title,
        "gridPos": place,
        "options": {"mode": "markdown", "content": content},
    }


def _targets(queries: tuple[Query, ...]) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + i),
            "datasource": _DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
        }
        for i, query in enumerate(queries)
    ]


def most(expression: str) -> str:
    """Its highest series: a cluster has thousands of pods."""
    return f"topk({_MOST}, {expression})"


def or_zero(expression: str) -> str:
    """For sums of series that exist only while something is wrong."""
    return f"{expression} or vector(0)"

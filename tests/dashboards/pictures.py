"""Draws the dashboards of a real agent for docs/: `python -m tests.dashboards.pictures DIRECTORY`.

Neither Debian nor PyPI has Grafana, so the answers of a real Prometheus to the panels' queries are
drawn here.
"""

import json
import pathlib
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any

from agent.lab import attempts
from agent.lab import lab as labs
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import PORT
from agent.operate.monitoring import rule_files
from agent.operate.monitoring.dashboards import DASHBOARDS
from agent.operate.monitoring.panels import Panel, Stat
from tests.dashboards import drawing, prometheus
from tests.dashboards.prometheus import Series
from tests.page import node as page_node

_SCRAPE_SECONDS = 2
_SECONDS = 120
# Of rates, instead of 5 minutes.
_WINDOW_SECONDS = 20
_MAX_BYTES = 300_000
# The node of the picture has no cluster, and does not measure programs unless the machine does.
_MAY_BE_EMPTY = {
    *("Rule hits", "Programs", "Patches of conditions", "Age of watches"),
    "Pods in audit with the most that enforce would drop",
    "Open: admitted while the agent or the kubelet is missing",
    *("Alerts that fire", "Policies: new flows that they admit", "Policies that expire"),
    "Policies that are not in force as written",
    *("Agents that do not respond, or are not ready", "Components that do not work"),
    *("Pods that are not as desired, by node", "Fallbacks of the relay", "Late conditions"),
}


def _traffic(node: DemoNode) -> None:
    """What a node has: drops, connections of the kubelet, and a busy minute."""
    end = time.monotonic() + _SECONDS
    number = 0
    while time.monotonic() < end:
        number += 1
        for _ in range(1 + 4 * (number % 30 > 20)):
            node.connect(node.pods.web, "IPv4", is_rejected=True)
        node.connect(node.pods.rpc, "IPv4", is_rejected=False)
        node.kubelet.probe("http", attempts.address_of(node.pods.web, "IPv4"), PORT)
        time.sleep(0.5)


def _short(text: str) -> str:
    """Rates of a run of two minutes."""
    return text.replace("[5m]", f"[{_WINDOW_SECONDS}s]")


def _series(panels: Iterable[Panel | Stat], start: float, end: float) -> list[Series]:
    found = []
    for panel in panels:
        series: Series = {}
        for query in panel.queries:
            expression = _short(query.expression)
            for variable in ("$cluster", "$instance"):
                expression = expression.replace(variable, ".*")
            series |= prometheus.query(expression, query.legend, start, end, _SCRAPE_SECONDS)
        if not series and panel.title not in _MAY_BE_EMPTY:
            sys.exit(f"the panel {panel.title!r} has no data")
        found.append(series)
    return found


def _rules() -> dict[str, Any]:
    rules: dict[str, Any] = json.loads(_short(json.dumps(rule_files.all_rules())))
    return rules


def main() -> None:
    directory = pathlib.Path(sys.argv[1]).absolute()
    labs.isolate()
    with (
        tempfile.TemporaryDirectory() as data,
        page_node.running() as (address, node),
        prometheus.running(
            pathlib.Path(data), urllib.parse.urlsplit(address).netloc, _SCRAPE_SECONDS, _rules()
        ),
    ):
        start = time.time()
        _traffic(node)
        for dashboard in DASHBOARDS:
            between = (start + _WINDOW_SECONDS, time.time())
            stats = _series(dashboard.stats, *between)
            content = drawing.picture(dashboard, stats, _series(dashboard.panels, *between))
            if len(content) > _MAX_BYTES:
                sys.exit(f"the picture has {len(content)} bytes; at most {_MAX_BYTES}")
            (directory / f"dashboard-{dashboard.uid}.svg").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()

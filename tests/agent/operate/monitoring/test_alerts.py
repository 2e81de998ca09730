"""Alerts fire when they should and are silent otherwise, by promtool; each has a runbook."""

import itertools
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from agent import metrics
from agent.operate.cli import reference
from agent.operate.monitoring import alerts
from agent.operate.monitoring.alerts import ALERTS, Alert
from agent.operate.monitoring.dashboards import DASHBOARDS, Dashboard
from tests.agent.operate.monitoring.cases import CASES, HOUR, LRU, Case

ROOT = pathlib.Path(__file__).parents[4]
PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"
SECTIONS = ["## Symptom", "## Check", "## Cause", "## Cure"]
_NAME = re.compile(r"\b(?:podgate|prober)_[a-z_]+")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


@pytest.fixture(scope="module")
def families() -> set[str]:
    """Names of all metrics, which are declared by all collectors."""
    reference.pages()
    return {family.name for family in metrics.families()}


def test_each_alert_has_a_case_and_its_own_name() -> None:
    assert [alert.name for alert in ALERTS] == list(CASES)


def test_each_alert_has_a_runbook() -> None:
    headings, empty = {}, []
    for alert in ALERTS:
        lines = (ROOT / alert.runbook).read_text("utf-8").splitlines()
        headings[alert.name] = [lines[0], *(line for line in lines if line.startswith("## "))]
        for section in set(SECTIONS) & set(lines):
            following = lines[lines.index(section) + 1 :]
            if not [line for line in following[:4] if line and not line.startswith("#")]:
                empty.append(f"{alert.runbook}: {section} is empty")
    assert headings == {alert.name: [f"# {alert.name}", *SECTIONS] for alert in ALERTS}
    assert empty == []


def test_description_is_the_symptom_without_links() -> None:
    (alert,) = (alert for alert in ALERTS if alert.name == "PodgateComponentDown")
    description = alert.description()
    assert description.startswith("A part of podgate that this node needs does not work. ")
    assert description.endswith("Findings has the others.")


def test_each_runbook_has_an_alert() -> None:
    pages = {path.stem for path in (ROOT / alerts.RUNBOOKS).glob("*.md")}
    assert pages == {alert.name for alert in ALERTS}


def _unknown(expression: str, families: set[str]) -> set[str]:
    return {name for name in _NAME.findall(expression) if _SUFFIX.sub("", name) not in families}


def test_metrics_of_alerts_and_dashboards_exist(families: set[str]) -> None:
    expressions = {alert.name: [alert.expression] for alert in ALERTS}
    for dashboard in DASHBOARDS:
        expressions[dashboard.uid] = _expressions(dashboard)
    assert [name for name, found in expressions.items() if not found] == []
    unknown = {
        (name, metric)
        for name, found in expressions.items()
        for expression in found
        for metric in _unknown(expression, families)
    }
    assert unknown == set()


def _expressions(dashboard: Dashboard) -> list[str]:
    return [query.expression for panel in dashboard.panels for query in panel.queries]


def test_unknown_metric_would_be_found(families: set[str]) -> None:
    assert _unknown("rate(podgate_no_such_total[5m])", families) == {"podgate_no_such_total"}


def test_expressions_of_dashboards_can_be_parsed(tmp_path: pathlib.Path) -> None:
    """As recording rules, since promtool parses those."""
    rules = [
        {"record": f"panel:{i}", "expr": expression.replace("$instance", ".*")}
        for i, expression in enumerate(itertools.chain.from_iterable(map(_expressions, DASHBOARDS)))
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = _promtool("check", "rules", "--lint=none", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_rules_file_is_valid() -> None:
    checked = _promtool("check", "rules", str(ROOT / "deploy/monitoring/alerts.yaml"))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_alerts_fire_and_are_silent(tmp_path: pathlib.Path) -> None:
    """All in one run of promtool, with a file for each alert: it evaluates all rules of a file at
    each interval."""
    tests = tmp_path / "tests"
    tests.mkdir()
    for alert in ALERTS:
        case = CASES[alert.name]
        made = [_test(alert, case, is_firing=is_firing) for is_firing in (True, False)]
        if alert.name == "PodgateMapNearlyFull":
            made.append(_test(alert, Case({}, LRU), is_firing=False))
        content = {
            "rule_files": [str(_rule_file(tmp_path, alert))],
            "evaluation_interval": case.every,
            "tests": made,
        }
        (tests / f"{alert.name}.yaml").write_text(yaml.safe_dump(content))
    run = _promtool("test", "rules", *(str(path) for path in tests.iterdir()))
    assert run.returncode == 0, run.stdout + run.stderr


def _rule_file(directory: pathlib.Path, alert: Alert) -> pathlib.Path:
    """The alert's rule, as it is shipped."""
    shipped = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text("utf-8"))
    (rule,) = (
        rule
        for group in shipped["groups"]
        for rule in group["rules"]
        if rule["alert"] == alert.name
    )
    path = directory / f"{alert.name}.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    return path


def test_summary_names_the_instance_where_the_job_adds_no_node(tmp_path: pathlib.Path) -> None:
    (alert,) = (alert for alert in ALERTS if alert.name == "PodgateNotReady")
    case = Case({'podgate_ready{instance="192.0.2.1:9652"}': f"0{HOUR}"}, {}, {"node": ""})
    rules = str(ROOT / "deploy/monitoring/alerts.yaml")
    content = {"rule_files": [rules], "tests": [_test(alert, case, is_firing=True)]}
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump(content))
    run = _promtool("test", "rules", str(path))
    assert run.returncode == 0, run.stdout + run.stderr


def test_alert_that_does_not_fire_would_be_found(tmp_path: pathlib.Path) -> None:
    alert = next(alert for alert in ALERTS if alert.name == "PodgateKubeletUnknown")
    case = CASES[alert.name]
    wrong = Case(case.quiet, case.fires, case.labels)
    path = tmp_path / "tests.yaml"
    rules = str(ROOT / "deploy/monitoring/alerts.yaml")
    tests = [_test(alert, wrong, is_firing=True), _test(alert, wrong, is_firing=False)]
    path.write_text(yaml.safe_dump({"rule_files": [rules], "tests": tests}))
    assert _promtool("test", "rules", str(path)).returncode == 1


def _test(alert: Alert, case: Case, *, is_firing: bool) -> dict[str, Any]:
    series = case.fires if is_firing else case.quiet
    labels = {
        "severity": alert.severity.value,
        **{"node": "node1", "instance": "192.0.2.1:9652"},
        **case.labels,
    }
    labels = {name: value for name, value in labels.items() if value}
    expected = [{"exp_labels": labels, "exp_annotations": _annotations(alert, labels)}]
    return {
        "name": f"{alert.name} {'fires' if is_firing else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": case.at,
                "alertname": alert.name,
                "exp_alerts": expected if is_firing else [],
            }
        ],
    }


def _annotations(alert: Alert, labels: dict[str, str]) -> dict[str, str]:
    values = {"node": labels.get("instance", ""), **labels}
    summary = re.sub(
        r"{{ \$labels\.(\w+) }}", lambda found: values.get(found[1], ""), alert.summary
    )
    return {"summary": summary, "description": alert.description(), "runbook": alert.runbook}


def _promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((PROMTOOL, *arguments), capture_output=True, text=True, timeout=100)

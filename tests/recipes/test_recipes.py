"""Each recipe of CONTRIBUTING.md leads to its end: a test does its steps in a copy of the tree, in
the order of the page, and the new thing works there.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.recipes.conftest import Recipe
from tests.recipes.tree import ROOT, StepError, steps

PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"


def test_steps_are_taken_in_the_order_of_the_page(recipe: Recipe) -> None:
    tree = recipe("Metric", "age")
    with pytest.raises(StepError, match="The next step of 'Metric' is"):
        tree.edit("agent/metrics.py", ("import", " "))
    with pytest.raises(StepError, match=r"Steps are left: agent/gates/metrics\.py"):
        tree.run("print()")
    with pytest.raises(StepError, match="has 0 places"):
        tree.edit("agent/gates/metrics.py", ("no such line", ""))
    with pytest.raises(StepError, match="no recipe 'Cake'"):
        steps("Cake")


def test_command(recipe: Recipe) -> None:
    tree = recipe("Command", "age")
    tree.edit("agent/operate/cli/main.py", ("_COMMANDS = (\n", '    "age",\n'))
    tree.add(
        "agent/operate/cli/commands/age.py",
        '''\
import pathlib

import click

from agent.operate.cli.commands import options


@click.command(short_help="Show since when the agent runs.")
@options.output
@options.run_directory
def age(output: options.Format, run_directory: pathlib.Path) -> None:
    """Show since when the agent runs."""
    from agent.admin.report import AgeReport
    from agent.operate.cli import answers
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import age as view

    report = answers.read(run_directory, "/age", AgeReport)
    screens.write(report, output, lambda screen: view.show(screen, report))
''',
    )
    tree.add(
        "agent/operate/cli/views/age.py",
        """\
from agent.admin.report import AgeReport
from agent.operate.cli.output import Screen


def show(screen: Screen, report: AgeReport) -> None:
    screen.line(f"The agent runs since {report.started:%Y}.")
""",
    )
    tree.edit(
        "agent/operate/cli/schemas.py",
        ("from agent.admin.report import (\n", "    AgeReport,\n"),
        ("DOCUMENTS: dict[str, tuple[Any, str]] = {\n", '    "age": (AgeReport, "podgate age"),\n'),
    )
    tree.edit(
        "agent/admin/report.py",
        (
            "from agent.pods.pod import Problem\n",
            """

class AgeReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    started: datetime.datetime
""",
        ),
    )
    tree.edit(
        "agent/app/reports.py",
        ("from agent.admin.report import (\n", "    AgeReport,\n"),
        (
            "        return await self._metrics.render()\n",
            """
    async def age(self) -> AgeReport:
        return AgeReport(started=self._started)
""",
        ),
    )
    tree.edit(
        "agent/app/http_server.py",
        ("import AgentReport", ", AgeReport"),
        (
            "    async def report(self) -> AgentReport: ...\n",
            "    async def age(self) -> AgeReport: ...\n",
        ),
        (
            '    admin.router.add_get("/version", _version)\n',
            '    admin.router.add_get("/age", _json(agent.age))\n',
        ),
    )
    tree.edit(
        "tests/agent/operate/cli/stub_agent.py",
        (
            '    "/status": msgspec.json.encode(reports.STATUS),\n',
            '    "/age": b\'{"started": "2026-11-25T16:00:00Z"}\',\n',
        ),
    )
    tree.edit(
        "tests/agent/operate/cli/screens.py",
        (
            "VIEWS: dict[str, Callable[[Screen], None]] = {\n",
            '    "age": lambda screen: age.show(screen, AgeReport(started=reports.NOW)),\n',
        ),
        ("from agent.operate.cli.views import (\n", "    age,\n"),
        ("import rich.console\n", "from agent.admin.report import AgeReport\n"),
    )
    tree.edit("tests/agent/operate/cli/answering.py", ('COMMANDS = ("status", ', '"age", '))
    shown = tree.run(
        """
import asyncio, datetime, pathlib, socket, sys, tempfile
from click.testing import CliRunner
from agent.app import http_server
from agent.app.reports import Reports
from agent.operate.cli import schemas
from agent.operate.cli.main import main
from agent.settings import admin_socket
from tests.agent.operate.cli import answering, screens

class Agent(Reports):
    def __init__(self):
        self._started = datetime.datetime(2026, 11, 25)

async def serve(directory):
    path = admin_socket(directory)
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        async with http_server.serve_admin(Agent(), listening):
            command = ["age", "--run-directory", str(directory)]
            return await asyncio.to_thread(CliRunner().invoke, main, command)

with tempfile.TemporaryDirectory() as directory:
    print(asyncio.run(serve(pathlib.Path(directory))).output)
assert "age" in CliRunner().invoke(main, ["--help"]).output
assert '"started"' in schemas.schemas()["age.schema.json"]
assert screens.screens()["age.80.txt"] == ["The agent runs since 2026."]
assert "age" in answering.COMMANDS
"""
    )
    assert "The agent runs since 2026." in shown


def test_metric(recipe: Recipe) -> None:
    tree = recipe("Metric", "age")
    tree.edit(
        "agent/gates/metrics.py",
        (
            "_UNGATED_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600)\n",
            'PODS = MetricFamily("podgate_example_pods", "gauge", "Pods of an example.")\n',
        ),
        (
            "        yield from self.attach_seconds.collect()\n",
            "        yield labelled(PODS, [((), len(self._store.pods))])\n",
        ),
    )
    shown = tree.run(
        """
import asyncio
from agent.app.exporter import Exporter
from agent.gates.metrics import GateMetrics
from agent.operate.cli import reference
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore

store = PodStore(Conditions())
store.set_pod(Pod(uid="uid", namespace="shop", name="web"))
exporter = Exporter(refreshed=(), collectors=(GateMetrics(store),))
print(asyncio.run(exporter.render()).decode())
print(reference._metrics())
"""
    )
    assert "podgate_example_pods 1.0\n" in shown
    assert "| `podgate_example_pods` | gauge | none | Pods of an example. |" in shown


def test_finding(recipe: Recipe) -> None:
    tree = recipe("Finding", "disk-slow")
    tree.edit(
        "agent/admin/finding_kinds/node.py",
        (
            "from agent.admin.finding_kinds.kind import BROKEN, DEGRADED, NOTE, OPEN, define\n",
            """
DISK_SLOW = define(
    "disk-slow",
    BROKEN,
    "The disk is slow.",
    "Replace it.",
)
""",
        ),
    )
    tree.edit(
        "agent/admin/report.py", ("    pods: list[PodStatus]\n", '    disk_problem: str = ""\n')
    )
    tree.edit(
        "agent/app/reports.py",
        ("            kubelet=kubelet.path,\n", '            disk_problem="far too slow",\n'),
    )
    tree.edit(
        "agent/admin/findings.py",
        (
            "def _of_agent(report: AgentReport) -> Iterator[Finding]:\n",
            """    if report.disk_problem:
        yield found(kinds.DISK_SLOW, f"The disk is {report.disk_problem}")
""",
        ),
    )
    tree.edit(
        "tests/agent/admin/test_findings.py",
        (
            "OF_NODE: tuple[tuple[dict[str, Any], Kind, str], ...] = (\n",
            '    ({"disk_problem": "wrong"}, kinds.DISK_SLOW, "The disk is wrong."),\n',
        ),
    )
    tree.edit(
        "tests/agent/operate/finding_states.py",
        ("UNMADE: dict[str, str] = {", '"disk-slow": "a test has no slow disk"'),
    )
    shown = tree.run(
        """
from agent.admin.finding_kinds import page
from agent.app import reports
from agent.operate.cli.output import Screen
from agent.operate.cli.views import status
from agent.operate.page import content
from tests.agent.admin import test_findings
from tests.agent.operate import finding_states, test_front_ends
from tests.agent.operate.page.reports import NOW, drops, report

changes, kind, sentence = test_findings.OF_NODE[0]
test_findings.test_state_of_the_node_is_one_finding(changes, kind, sentence)
whole = report(disk_problem="far too slow")
status.show(Screen(), whole)
assert b"The disk is far too slow." in content.full_page(whole, drops(), now=NOW)
assert "`disk-slow`" in page.text()
test_front_ends.test_each_kind_of_a_report_has_a_state_that_makes_it()
assert finding_states.problems() == []
"""
    )
    assert shown.startswith("broken: The disk is far too slow.")


def test_alert(recipe: Recipe, tmp_path: pathlib.Path) -> None:
    tree = recipe("Alert", "PodgateExample")
    tree.edit(
        "agent/operate/monitoring/alerts.py",
        (
            "ALERTS = (\n",
            """    Alert(
        "PodgateExample",
        Severity.INFO,
        _found(kinds.RELAY_FULL),
        "5m",
        "It is an example.",
    ),
""",
        ),
    )
    tree.add(
        "docs/runbooks/PodgateExample.md",
        "# PodgateExample\n\n"
        + "\n".join(
            f"## {heading}\n\nNone.\n" for heading in ("Symptom", "Check", "Cause", "Cure")
        ),
    )
    tree.edit(
        "tests/agent/operate/monitoring/cases.py",
        ("CASES = {\n", '    "PodgateExample": _found("relay-full", "kubelet-unknown"),\n'),
    )
    files = json.loads(
        tree.run(
            """
import json
from agent.operate.cli import reference
from agent.operate.monitoring import alerts
from agent.operate.monitoring.alerts import ALERTS
from tests.agent.operate.monitoring import test_alerts
from tests.agent.operate.monitoring.cases import CASES

test_alerts.test_each_alert_has_a_case_and_its_own_name()
test_alerts.test_each_alert_has_a_runbook()
test_alerts.test_each_runbook_has_an_alert()
assert "PodgateExample" in alerts.table()
case = CASES["PodgateExample"]
tests = [test_alerts._test(ALERTS[0], case, is_firing=is_firing) for is_firing in (True, False)]
print(json.dumps({
    "rules.yaml": alerts.rules(),
    "tests.yaml": {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests},
}))
"""
        )
    )
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    checked = subprocess.run(
        (PROMTOOL, "test", "rules", "tests.yaml"), cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_recipe_is_taken() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    titles = {
        section.splitlines()[0]
        for section in page.partition("\n## Recipes\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    }
    source = "".join(path.read_text("utf-8") for path in pathlib.Path(__file__).parent.glob("*.py"))
    assert {title for title in titles if f'recipe("{title}"' not in source} == set()

"""Each recipe of CONTRIBUTING.md leads to its end: a test does its steps in a copy of the tree, in
the order of the page, and the new thing works there.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.recipes.tree import ROOT, StepError, Tree, steps

PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"


def test_steps_are_taken_in_the_order_of_the_page(tmp_path: pathlib.Path) -> None:
    tree = Tree("Metric", "age", tmp_path)
    with pytest.raises(StepError, match="The next step of 'Metric' is"):
        tree.edit("agent/metrics.py", ("import", " "))
    with pytest.raises(StepError, match=r"Steps are left: agent/gates/metrics\.py"):
        tree.run("print()")
    with pytest.raises(StepError, match="has 0 places"):
        tree.edit("agent/gates/metrics.py", ("no such line", ""))
    with pytest.raises(StepError, match="no recipe 'Cake'"):
        steps("Cake")


def test_command(tmp_path: pathlib.Path) -> None:
    tree = Tree("Command", "age", tmp_path)
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


def test_metric(tmp_path: pathlib.Path) -> None:
    tree = Tree("Metric", "age", tmp_path)
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


def test_finding(tmp_path: pathlib.Path) -> None:
    tree = Tree("Finding", "disk-slow", tmp_path)
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


def test_probe_handler(tmp_path: pathlib.Path) -> None:
    tree = Tree("Probe handler", "banner", tmp_path)
    tree.edit(
        "probes/spec/definitions.py",
        (
            "class Exec(msgspec.Struct, frozen=True):\n",
            """    command: tuple[str, ...]

    def __str__(self) -> str:
        return "exec"


class Banner(msgspec.Struct, frozen=True):
    \"""The server's first bytes; OK is healthy.\"""

    port: int

    def __str__(self) -> str:
        return f"banner :{self.port}"


class _Rest(msgspec.Struct, frozen=True):
""",
        ),
        ("NetworkHandler = HttpGet | TcpSocket | Grpc", " | Banner"),
    )
    tree.edit(
        "probes/spec/handler_fields.py",
        (
            "        return definitions.TcpSocket(port)\n",
            """

class BannerFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    port: PortNumber | PortName

    def handler(self, port: int) -> NetworkHandler:
        return definitions.Banner(port)
""",
        ),
    )
    tree.edit(
        "probes/spec/handlers.py",
        ("import PORT_MAX, ", "Banner, "),
        (
            "    return None if port is None else TcpSocket(port)\n",
            """

def _read_banner(fields: Fields, named_ports: dict[str, int]) -> Banner | None:
    port = _read_port(fields, named_ports)
    return None if port is None else Banner(port)


def _banner_target(handler: Banner, _: str, __: float) -> "ExchangeTarget":
    from probes.protocols.banner import BannerTarget

    return BannerTarget(handler.port)
""",
        ),
        (
            "KINDS = {\n",
            """    "bannerSocket": HandlerKind(
        Banner, "banner", handler_fields.BannerFields, _read_banner, _banner_target
    ),
""",
        ),
    )
    tree.add(
        "probes/protocols/banner.py",
        """\
from probes.protocols.exchanges import DialHop
from probes.protocols.tcp import TcpExchange
from probes.results import ExchangeResult, ProbeResult


class BannerTarget:
    def __init__(self, port: int) -> None:
        self.hop = DialHop(port)

    def exchange(self) -> "BannerExchange":
        return BannerExchange(self.hop)


class BannerExchange(TcpExchange):
    def start(self) -> bytes:
        return b""

    def receive(self, data: bytes) -> bytes:
        is_healthy = data == b"OK"
        result = ProbeResult.SUCCESS if is_healthy else ProbeResult.FAILURE
        self.verdict = ExchangeResult(result, data.decode())
        return b""
""",
    )
    shown = tree.run(
        """
import json
from click.testing import CliRunner
from agent.operate.cli.commands.probe import _handler
from agent.operate.cli.main import main
from probes.engine import prober
from probes.spec import handlers, probespec
from probes.spec.specs import parse_pod

probe = {"bannerSocket": {"port": 9}}
of_pod = parse_pod({"spec": {"containers": [{"name": "app", "livenessProbe": probe}]}})
assert of_pod.errors == (), of_pod.errors
text = {"apiVersion": "podgate.io/v2"}
text["containers"] = [{"name": "app", "readiness": {"banner": {"port": "main"}}}]
found = probespec.read(json.dumps(text), {"app": {"main": 9}})["app"].readiness
assert found.handler == of_pod.containers[0].liveness.handler
assert of_pod.declared.ports == {9}
exchange = prober.plan(found, ("198.18.1.1",)).candidates[0].target.exchange()
exchange.start()
exchange.receive(b"OK")
assert "banner" in probespec.schema()["$defs"]["ProbeFields"]["properties"]
assert "banner" in CliRunner().invoke(main, ["probe", "--help"]).output
options = {"path": "/", "tls": False, "h2c": False, "headers": (), "service": ""}
assert _handler("banner", 9, **options) == found.handler
print(found.handler, exchange.verdict.result.value)
"""
    )
    assert shown == "banner :9 success\n"


def test_proxy_backend(tmp_path: pathlib.Path) -> None:
    tree = Tree("Proxy backend", "shown", tmp_path)
    tree.add(
        "agent/services/proxy/shown.py",
        """\
from agent.linux.nft_monitor import Deleted
from agent.services.proxy.frontends import FrontendChange


class ShownBackend:
    is_polled = False

    async def apply(self, change: FrontendChange) -> None:
        print("applied", len(change.changed))

    def is_concerned(self, deleted: Deleted) -> bool:
        return False

    async def repair(self) -> bool:
        return False

    async def close(self) -> None:
        print("closed")


async def remove() -> None:
    print("removed")
""",
    )
    tree.edit(
        "agent/services/proxy/backends.py",
        (
            "    await ipvs.remove()\n",
            """

async def _open_shown(_: BackendOptions) -> "Backend":
    from agent.services.proxy.shown import ShownBackend

    return ShownBackend()


async def _remove_shown(_: BackendOptions) -> None:
    from agent.services.proxy import shown

    await shown.remove()
""",
        ),
        ("BACKENDS = {\n", '    "shown": BackendKind(_open_shown, _remove_shown),\n'),
    )
    shown = tree.run(
        """
import sys
from unittest import mock
from click.testing import CliRunner
from agent.operate.cli.main import main
from agent.services.proxy.frontends import FrontendChange

async def run(backend, settings):
    await backend.apply(FrontendChange({}, set()))

command = ["proxy", "--backend", "shown", "--run-directory", sys.argv[1]]
with mock.patch("agent.app.preflight.check"), mock.patch(
    "agent.services.proxy.process.run", run
), mock.patch("agent.linux.directories.ensure_own"):
    for options in ([], ["--cleanup"]):
        print(CliRunner().invoke(main, [*command, *options], catch_exceptions=False).output)
""",
        str(tmp_path),
    )
    assert shown.split() == ["applied", "0", "closed", "removed"]


def test_source_of_policies(tmp_path: pathlib.Path) -> None:
    tree = Tree("Source of policies", "fixed", tmp_path)
    tree.add(
        "agent/policy/fixed.py",
        """\
import asyncio
from collections.abc import AsyncIterator

from agent.policy import api_types
from agent.policy.effective import PolicyBatch


class FixedPolicies:
    name = "fixed policies"
    problem = ""
    batch = PolicyBatch(name)

    def restore(self) -> None:
        document = {
            "apiVersion": "policy.podgate.io/v1alpha1",
            "kind": "HostAccessPolicy",
            "metadata": {"name": "fixed"},
            "spec": {
                "pods": {"namespaces": ["shop"]},
                "from": [{"anyProcess": {}}],
                "ports": [{"port": 8080}],
            },
        }
        self.batch = PolicyBatch(self.name, (api_types.read(document, source=self.name),))

    def refresh(self) -> bool:
        return False

    async def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        while True:
            await asyncio.sleep(at_least_every_seconds)
            yield
""",
    )
    tree.edit(
        "agent/policy/controller.py",
        (
            "        sources: list[PolicyProvider] = []\n",
            """        from agent.policy.fixed import FixedPolicies

        sources.append(FixedPolicies())
""",
        ),
    )
    (tmp_path / "rules").mkdir()
    shown = tree.run(
        """
import asyncio, pathlib, sys
from unittest import mock
from agent.pods.object_labels import ObjectLabels
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.policy.controller import PolicyController

async def admitted():
    root = pathlib.Path(sys.argv[1])
    settings = mock.Mock(rules=root / "rules", run_directory=root)
    store = PodStore(Conditions())
    policies = PolicyController(
        settings, mock.Mock(), mock.Mock(), api=None, store=store, labels=ObjectLabels(),
        modes=mock.Mock(), cgroup2=root,
    )
    await policies.open()
    return await policies.admit(Pod(uid="uid", namespace="shop", name="web"))

print([rule.first_port for rule in asyncio.run(admitted()).rules])
""",
        str(tmp_path),
    )
    assert shown.splitlines()[-1] == "[8080]"


def test_condition(tmp_path: pathlib.Path) -> None:
    tree = Tree("Condition", "tested", tmp_path)
    tree.edit(
        "agent/labels.py",
        ('PROBES_PASSING = f"{DOMAIN}/probes-passing"\n', 'TESTED = f"{DOMAIN}/tested"\n'),
    )
    tree.edit(
        "agent/pods/conditions.py",
        ("TYPES = (labels.ISOLATION_READY, labels.PROBES_PASSING", ", labels.TESTED"),
    )
    tree.edit(
        "agent/admin/findings.py",
        (
            "_BY_REASON: Mapping[str, Mapping[str, Kind]] = {\n",
            '    labels.TESTED: {"Untested": kinds.PATH_TEST_FAILED},\n',
        ),
    )
    tree.edit(
        "agent/controller/injection.py",
        ("VALUES: Final = {\n", '    labels.TESTED: ("all",),\n'),
    )
    tree.edit(
        "agent/operate/cli/views/status.py",
        (
            "PODS: tuple[Column[PodStatus], ...] = (\n",
            '    Column("TESTED", lambda pod: _reason(pod, labels.TESTED)),\n',
        ),
    )
    tree.edit(
        "agent/operate/page/content.py",
        (
            "    columns: tuple[_Column[PodStatus], ...] = (\n",
            '        ("tested", lambda pod: _condition(pod, labels.TESTED)),\n',
        ),
    )
    shown = tree.run(
        """
import json
from agent import labels
from agent.admin import findings
from agent.controller import injection
from agent.kube import condition_writer
from agent.operate.cli.output import Screen
from agent.operate.cli.views import status
from agent.operate.page import content
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from tests.agent.operate.page.reports import NOW, drops, pod, report

conditions = Conditions()
web = Pod(uid="uid", namespace="shop", name="web")
conditions.set(web, labels.TESTED, "False", "Untested", "No.")
written = conditions.of("uid")
assert labels.TESTED in condition_writer.TYPES
whole = report(pod(conditions=[*pod().conditions, *written]))
assert [(one.kind, one.sentence) for one in whole.findings] == [("path-test-failed", "No.")]
status.show(Screen(), whole)
assert b"Untested" in content.full_page(whole, drops(), now=NOW)
assert labels.TESTED in json.dumps(injection.webhook("podgate", dict.fromkeys(injection.VALUES)))
assert injection.patch((), labels.TESTED)
"""
    )
    assert "TESTED" in shown
    assert "Untested" in shown


def test_alert(tmp_path: pathlib.Path) -> None:
    tree = Tree("Alert", "PodgateExample", tmp_path)
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
    assert {title for title in titles if f'Tree("{title}"' not in source} == set()

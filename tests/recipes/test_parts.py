"""The recipes of parts of the agent: handlers, backends, sources of policies, conditions."""

import pathlib

from tests.recipes.conftest import Recipe


def test_probe_handler(recipe: Recipe) -> None:
    tree = recipe("Probe handler", "banner")
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
options["has_certificate"] = False
assert _handler("banner", 9, **options) == found.handler
print(found.handler, exchange.verdict.result.value)
"""
    )
    assert shown == "banner :9 success\n"


def test_proxy_backend(recipe: Recipe, tmp_path: pathlib.Path) -> None:
    tree = recipe("Proxy backend", "shown")
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


def test_source_of_policies(recipe: Recipe, tmp_path: pathlib.Path) -> None:
    tree = recipe("Source of policies", "fixed")
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
            "        sources: list[PolicyProvider[Policy]] = []\n",
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


def test_condition(recipe: Recipe) -> None:
    tree = recipe("Condition", "tested")
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
        ("VALUES = {\n", '    labels.TESTED: ("tested", "all", "everything"),\n'),
    )
    for template in ("injection", "webhooks"):
        tree.edit(
            f"deploy/chart/podgate/templates/{template}.yaml",
            ('dict "isolation" "isolation-ready"', ' "tested" "tested"'),
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
from tests.chart.test_chart import test_policies_and_webhooks_select_the_same_pods

conditions = Conditions()
web = Pod(uid="uid", namespace="shop", name="web")
conditions.set(web, labels.TESTED, "False", "Untested", "No.")
written = conditions.of("uid")
assert labels.TESTED in condition_writer.TYPES
whole = report(pod(conditions=[*pod().conditions, *written]))
assert [(one.kind, one.sentence) for one in whole.findings] == [("path-test-failed", "No.")]
status.show(Screen(), whole)
assert b"Untested" in content.full_page(whole, drops(), now=NOW)
assert injection.patch((), labels.TESTED)
test_policies_and_webhooks_select_the_same_pods()
"""
    )
    assert "TESTED" in shown
    assert "Untested" in shown

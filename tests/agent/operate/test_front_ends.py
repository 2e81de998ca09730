"""Every kind of finding, as each front end shows it: one severity and one sentence everywhere."""

import ast
import asyncio
import pathlib
from collections.abc import Iterator

import msgspec
import pytest

from agent.admin import finding_kinds, findings
from agent.admin.finding import Finding, found
from agent.admin.finding_kinds import KINDS, Kind, Severity
from agent.app.node_findings import NodeFindings
from agent.operate.cli.output import Screen
from agent.operate.cli.views import doctor as doctor_view
from agent.operate.cli.views import explain as explain_view
from agent.operate.cli.views import status as status_view
from agent.operate.doctor.results import report_of
from agent.operate.explain import pod_checks
from agent.operate.explain.pod_checks import PodFacts
from agent.operate.explain.pods import NamedPods
from agent.operate.kubectl import main
from agent.operate.page import content
from agent.pods.conditions import Conditions
from agent.pods.events import PodEvents
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from tests.agent.admin.test_findings import OF_NODE, OF_POD
from tests.agent.operate import finding_states
from tests.agent.operate.kubectl.reporting import encoded
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.operate.page.html import parse
from tests.agent.operate.page.reports import NOW, drops, pod, report

ROOT = pathlib.Path(__file__).parents[3] / "agent"
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)


@pytest.fixture(params=["node", "pod shop/web"])
def subject(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def of(kind: Kind, subject: str) -> Finding:
    return found(kind, f"It is {kind.name}", subject)


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@EVERY_KIND
def test_status_doctor_and_page(
    kind: Kind, subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = of(kind, subject)
    where = "shop/web: " if subject != "node" else ""
    line = f"{kind.severity}: {where}{one.sentence}"
    whole = msgspec.structs.replace(report(pod()), findings=[one])
    status_view.show(Screen(), whole)
    assert words(capsys).startswith(line)
    doctor_view.show(Screen(), report_of([one]))
    assert words(capsys).startswith(f"{line} {kind.remedy}")
    page = parse(content.full_page(whole, drops(), now=NOW))
    (item,) = page.all("li")
    assert item.text.startswith(f"{kind.severity}: {one.sentence}")
    assert kind.remedy in item.text


@EVERY_KIND
def test_explain_pod(kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    one = of(kind, "pod shop/web")
    whole = msgspec.structs.replace(report(pod(mode="strict")), findings=[one])
    facts = PodFacts(NamedPods(whole, None, ()).find("shop/web"), whole, [one])
    explanation = pod_checks.check(facts)
    (check,) = [check for check in explanation.checks if check.severity]
    assert (check.severity, check.text, check.remedy) == (
        kind.severity,
        one.sentence,
        kind.remedy,
    )
    assert not explanation.is_well
    explain_view.show_pod(Screen(), explanation)
    assert one.sentence in words(capsys)


@pytest.fixture
def plugin(tmp_path: pathlib.Path) -> KubectlStandin:
    made = KubectlStandin(tmp_path)
    made.serve_nodes("a", "b")
    return made


def test_plugin(plugin: KubectlStandin, subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All kinds at once: each command is a process."""
    every = [of(kind, subject) for kind in KINDS.values()]
    whole = msgspec.structs.replace(report(pod()), findings=every)
    plugin.respond("exec", "status", output=encoded(whole))
    plugin.respond("exec", "doctor", output=encoded(report_of(every)))
    where = "shop/web on a, b" if subject != "node" else "2 nodes (a, b)"
    for command in ("status", "doctor"):
        main.main(["--kubectl", plugin.command, command, "-o", "wide"])
        lines = capsys.readouterr().out.splitlines()[: len(every)]
        assert [line.partition(" ")[0] for line in lines] == sorted(
            (kind.severity for kind in KINDS.values()), key=lambda name: Severity.of(name).rank
        )
        for one in every:
            start = f"{one.severity} {where}: {one.sentence}"
            assert [line for line in lines if line.startswith(start)]


@pytest.mark.looptime
@EVERY_KIND
async def test_event_and_metric(kind: Kind, subject: str) -> None:
    one, events, store = of(kind, subject), PodEvents(), PodStore(Conditions())
    store.set_pod(Pod(uid="uid", namespace="shop", name="web"))
    node = NodeFindings(lambda: [one], events, store)
    await node.refresh()
    metric, _ = node.collect()
    assert [(sample.labels, sample.value) for sample in metric.samples] == [
        ({"severity": kind.severity, "kind": kind.name}, 1)
    ]
    recorded: list[tuple[str | None, str, str]] = []
    node.record()
    await asyncio.sleep(5)
    node.record()
    try:
        async with asyncio.timeout(1):
            recorded = [(one.uid, one.reason, one.message) for one in await events.next()]
    except TimeoutError:
        quiet = ("probe-failing", "pods-not-synced", "watch-broken", "conditions-not-written")
        assert kind.severity == Severity.NOTE or kind.name in quiet
        return
    uid = None if subject == "node" else "uid"
    assert recorded == [(uid, kind.reason, one.sentence)]


def test_ready_state_has_the_sentence_of_its_finding() -> None:
    whole = report(pod(), unsynced="no list of pods", open_ports="Ports are open.")
    unready = findings.unready(whole.unsynced, whole.open_ports)
    assert unready == whole.findings


def test_each_kind_of_a_report_has_a_state_that_makes_it() -> None:
    """The others are of pins, the machine or a cluster, which have tests of their own."""
    made = {kind.name for _, kind, _ in (*OF_NODE, *OF_POD)}
    source = (ROOT / "admin" / "findings.py").read_text(encoding="utf-8")
    judged = {
        kind.name
        for name, kind in vars(finding_kinds).items()
        if isinstance(kind, Kind) and f"kinds.{name}" in source
    }
    assert judged - made == {"gate-detached"}


def test_state_of_each_kind_is_made_by_a_test() -> None:
    assert finding_states.problems() == []


# Facts of reports that only findings judge: front ends print the sentences of these.
JUDGED = {
    *("problem_text", "open_ports", "kubelet_problem", "kubelet_unfollowed", "mode_problems"),
    *(
        "label_problems",
        "policy_problems",
        "network_policy_problems",
        "unsynced",
        "is_bypassed",
        "pending_seconds",
    ),
    *("openPorts", "kubeletProblem", "kubeletUnfollowed", "modeProblems", "isBypassed"),
    *("podSource", "isSynced", "rawSockets"),
}
MAKERS = {
    *("admin/finding.py", "admin/findings.py", "operate/pinned/findings.py"),
    # Of a cluster, which only the plugin sees.
    *(f"operate/kubectl/{name}.py" for name in ("ceilings", "cluster_findings", "findings")),
    *(f"operate/doctor/{path.name}" for path in (ROOT / "operate/doctor").glob("*.py")),
}


def _names(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _front_ends() -> Iterator[pathlib.Path]:
    for package in ("cli/views", "page", "kubectl", "explain", "doctor"):
        yield from (ROOT / "operate" / package).rglob("*.py")


@pytest.mark.parametrize("path", [*_front_ends()], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_front_end_judges_a_report(path: pathlib.Path) -> None:
    assert JUDGED.isdisjoint(_names(path))


def _makes_findings(tree: ast.AST) -> bool:
    """By `found` of agent.admin.finding under any name, or by the class itself."""
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "agent.admin.finding"
        for alias in node.names
        if alias.name == "found"
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func
        if isinstance(name, ast.Name) and name.id in {"Finding", *aliases}:
            return True
        if isinstance(name, ast.Attribute) and name.attr in ("Finding", "found"):
            owner = name.value
            if isinstance(owner, ast.Name) and owner.id in ("finding", "findings"):
                return True
    return False


def test_no_other_module_makes_findings() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    makers = {str(path.relative_to(ROOT)) for path, tree in trees.items() if _makes_findings(tree)}
    assert makers <= MAKERS


@pytest.mark.parametrize(
    ("source", "makes"),
    [
        ("from agent.admin.finding import found\nfound(kind, text)", True),
        ("from agent.admin.finding import found as made\nmade(kind, text)", True),
        ("from agent.admin import finding\nfinding.found(kind, text)", True),
        ("from agent.admin import finding\nfinding.Finding(kind=kind)", True),
        ("from agent.operate.kubectl.findings import Finding\nFinding('', kind)", True),
        ("from agent.admin import findings\nfindings.find(report)", False),
        ("found = search()\nfound(1)", False),
    ],
)
def test_maker_of_findings_is_recognised(source: str, makes: bool) -> None:
    assert _makes_findings(ast.parse(source)) is makes

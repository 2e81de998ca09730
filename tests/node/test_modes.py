"""Modes by labels of node, namespace and pod, in a running agent."""

import asyncio
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.default_deny import installed
from agent.lab import agent_process
from agent.logs import Event
from tests import polling
from tests.agent.kube.apiserver import NODES
from tests.kernel import dialling, offers, traffic
from tests.node.node import NAME, NAMESPACE, PORT, Node, reason_of, status_of

pytestmark = pytest.mark.kernel

# host-local gives the runtime's pods one after the other.
FIRST = "198.18.16.2"
AUDIT = ("--mode", "audit")


def label_node(node: Node, **words: str) -> None:
    """mode, max_mode: of the node's labels."""
    found = {f"podgate.io/{name.replace('_', '-')}": word for name, word in words.items()}
    node.server.put({"kind": "Node", "metadata": {"name": NAME, "labels": found}}, path=NODES)


def label_namespace(node: Node, **words: str) -> None:
    found = {f"podgate.io/{name.replace('_', '-')}": word for name, word in words.items()}
    node.label_namespace(found)


def is_open(address: str = FIRST) -> bool:
    """Whether a host process connects to the pod."""
    return traffic.is_reached(address, PORT)


def is_closed(address: str = FIRST) -> bool:
    return traffic.is_dropped(address, PORT)


def isolation(node: Node, name: str = "web") -> tuple[str, str]:
    """Status and reason of the condition in the API."""
    condition = node.condition(name, labels.ISOLATION_READY)
    return condition.get("status", ""), condition.get("reason", "")


def message(node: Node, name: str = "web") -> str:
    return str(node.condition(name, labels.ISOLATION_READY).get("message", ""))


def has_message(part: str) -> Callable[[AgentReport], bool]:
    """Whether the condition's message in the agent's own report has this part."""

    def holds(report: AgentReport) -> bool:
        condition = agent_process.condition_of(report, "web", labels.ISOLATION_READY)
        return condition is not None and part in condition.message

    return holds


def isolated_as(reason: str, name: str = "web") -> Callable[[AgentReport], bool]:
    return lambda report: reason_of(report, name) == reason


async def run_web(node: Node, **metadata: Any) -> str:
    node.create("web", **metadata)
    sandbox = await node.run_pod("web")
    await node.ready("web")
    return sandbox


async def test_label_of_a_namespace_enforces_its_pods_on_a_node_in_audit(node: Node) -> None:
    await node.start_agent(*AUDIT)
    await run_web(node)
    assert isolation(node) == ("True", "Audit")
    assert is_open()

    label_namespace(node, mode="enforce")
    await node.until("the first step", lambda: isolation(node) == ("True", "Enforced"))
    assert is_closed()
    seen = await node.report("its mode", isolated_as("Enforced"))
    assert (seen.default_mode, status_of(seen, "web").mode) == ("audit", "enforce")

    label_namespace(node)
    await node.until("the step back", lambda: isolation(node) == ("True", "Audit"))
    assert is_open()


async def test_ceiling_of_the_node_limits_labels_and_is_reported(node: Node) -> None:
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await run_web(node)
    assert isolation(node) == ("True", "Enforced")
    assert is_closed()

    label_node(node, max_mode="audit")
    await node.until("the way out", lambda: isolation(node) == ("True", "Audit"))
    assert is_open()
    expected = "Mode enforce is limited to audit by the node's label podgate.io/max-mode."
    assert expected in message(node)
    sample = f'podgate_mode_label_problem{{namespace="{NAMESPACE}",pod="web",reason="ModeLimited"}}'
    assert f"{sample} 1.0" in (await node.get_http("/metrics"))[1]
    shown = await status_of_command(node)
    assert "modes: default audit, at most audit" in shown
    assert f"{expected} Pods: {NAMESPACE}/web." in shown

    label_node(node, max_mode="off")
    await node.until("no gate", lambda: isolation(node) == ("True", "Off"))
    assert "is limited to off" in message(node)
    report = await node.report("no gate", lambda report: not status_of(report, "web").gates)
    assert status_of(report, "web").mode == "off"

    label_node(node)
    await node.until("the way back", lambda: isolation(node) == ("True", "Enforced"))
    assert is_closed()
    assert "limited" not in message(node)
    assert "podgate_mode_label_problem{" not in (await node.get_http("/metrics"))[1]


async def test_ceiling_by_option_bounds_the_nodes_default_too(node: Node) -> None:
    label_node(node, mode="strict")
    await node.start_agent("--max-mode", "audit")
    await run_web(node)
    assert isolation(node) == ("True", "Audit")
    assert "Mode strict is limited to audit by --max-mode." in message(node)


async def test_pods_label_is_less_strict_only_where_the_namespace_allows_it(node: Node) -> None:
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await run_web(node, labels={labels.MODE_LABEL: "off"})
    assert isolation(node) == ("True", "Enforced")
    assert "is less strict than enforce and is ignored" in message(node)
    label_namespace(node, mode="enforce", mode_override="allowed")
    await node.until("its own mode", lambda: isolation(node) == ("True", "Off"))


async def test_unreadable_label_opens_nothing_also_over_a_restart(node: Node) -> None:
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await run_web(node)
    label_namespace(node, mode="enfroce")
    # The API server gets a changed text within a minute, the agent's own clients at once.
    seen = await node.report("the problem", has_message("'enfroce', which is no mode"))
    assert reason_of(seen, "web") == "Enforced"
    assert "'enfroce', which is no mode" in await status_of_command(node)
    for number in (signal.SIGTERM, signal.SIGKILL):
        await node.stop_agent(number)
        await node.start_agent(*AUDIT)
        await node.report("its last mode", isolated_as("Enforced"))
        assert is_closed()

    # A pod that is new has no other label to go by than the namespace's.
    node.create("new", labels={labels.MODE_LABEL: "of"})
    await node.run_pod("new")
    await node.ready("new")
    assert isolation(node, "new") == ("True", "Enforced")
    assert "'of', which is no mode" in message(node, "new")


async def test_restart_without_api_and_saved_state_opens_no_gate(node: Node) -> None:
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await run_web(node)
    await node.stop_agent(signal.SIGKILL)
    await node.stop_api()
    await asyncio.to_thread(shutil.rmtree, node.operator.run_directory)

    await node.start_agent(*AUDIT)
    seen = await node.report("the gate", isolated_as("Enforced"))
    assert status_of(seen, "web").source == "runtime"
    [problem] = status_of(seen, "web").mode_problems
    assert problem.message == (
        "The gate keeps mode enforce until the labels of node and namespaces are listed."
    )
    assert is_closed()
    # The ceiling is the way out also here.
    await node.stop_agent()
    await node.start_agent(*AUDIT, "--max-mode", "audit")
    await node.report("the way out", isolated_as("Audit"))
    assert is_open()


async def test_kept_gates_follow_labels_when_these_are_listed(node: Node) -> None:
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await run_web(node)
    await node.stop_agent(signal.SIGKILL)
    await node.stop_api()
    await asyncio.to_thread(shutil.rmtree, node.operator.run_directory)
    await node.start_agent(*AUDIT)
    await node.report("the gate", isolated_as("Enforced"))

    label_namespace(node)
    await node.start_api()
    await node.until("audit", lambda: isolation(node) == ("True", "Audit"))
    assert is_open()
    assert "keeps mode" not in message(node)


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "dead"])
async def test_pods_of_an_enforced_namespace_are_never_open_on_a_node_in_audit(
    node: Node, plugin: pathlib.Path, is_running: bool
) -> None:
    """With podgate-cni, which gets the namespace from the runtime."""
    label_namespace(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await node.report("the agent", lambda report: report.is_synced)
    await node.install_plugin(plugin)
    if not is_running:
        await node.stop_agent(signal.SIGKILL)
    with dialling.dialling(FIRST) as dialler:
        node.create("web")
        await node.run_pod("web")
        if not is_running:
            await asyncio.to_thread(dialler.go_on)
            await node.start_agent(*AUDIT)
        await node.ready("web")
        await asyncio.to_thread(dialler.go_on)
        assert dialler.connected == 0
    assert isolation(node) == ("True", "Enforced")
    assert not list(node.operator.log_lines(Event.CONTAINERS_STARTED_BEFORE_GATE))

    # The file follows the labels.
    if is_running:
        label_node(node, max_mode="audit")
        state = node.operator.run_directory / "cni.json"
        await node.until("the ceiling", lambda: '"namespaces":{}' in state.read_text())


async def test_default_deny_table_follows_the_labels_of_the_node(node: Node) -> None:
    offers.need_default_deny()
    label_node(node, mode="enforce")
    await node.start_agent(*AUDIT)
    await node.report("the agent", lambda report: report.default_mode == "enforce")
    await tables(node, {"inet", "bridge"})
    with dialling.dialling(FIRST) as dialler:
        await run_web(node)
        await asyncio.to_thread(dialler.go_on)
        assert dialler.connected == 0
    label_node(node, mode="enforce", max_mode="audit")
    await tables(node, set())
    await node.until("audit", lambda: isolation(node) == ("True", "Audit"))
    assert is_open()


async def tables(node: Node, families: set[str]) -> None:
    """Wait until the host has podgate's default-deny table for these families."""

    async def installed_families() -> set[str]:
        return set(await installed.families())

    await polling.request_until(
        f"tables {families}", installed_families, lambda found: found == families
    )


async def status_of_command(node: Node) -> str:
    directory = str(node.operator.run_directory)
    done = await asyncio.to_thread(node.operator.run, "status", "--run-directory", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout

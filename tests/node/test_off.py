"""podgate is switched off for the whole cluster by a label of its own namespace."""

import asyncio
import pathlib
import signal

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.logs import Event
from bpf import pins
from tests.agent.kube.apiserver import NAMESPACES
from tests.cni import calling
from tests.kernel import attached
from tests.node.node import Node
from tests.node.test_modes import (
    is_closed,
    is_open,
    isolated_as,
    isolation,
    label_namespace,
    label_node,
    message,
    run_web,
)

pytestmark = pytest.mark.kernel

SECOND = "198.18.16.3"


def label_cluster(node: Node, max_mode: str | None) -> None:
    """The ceiling of the cluster, as `kubectl podgate off` sets it."""
    found = {labels.MAX_MODE_LABEL: max_mode} if max_mode else {}
    metadata = {"metadata": {"name": "podgate", "labels": found}}
    node.server.put({"kind": "Namespace", **metadata}, path=NAMESPACES)


async def until_off(node: Node) -> None:
    """Also until the relay has drained its connections, which the report does not wait for."""
    await node.report("off", is_off)
    await node.until("the relay gone", lambda: not attached.relays())


def is_off(report: AgentReport) -> bool:
    return report.max_mode == "off" and not report.in_force


@pytest.fixture
async def closed(node: Node) -> Node:
    """A node with a pod in an enforced namespace; the node's label makes it a canary."""
    label_cluster(node, None)
    label_namespace(node, mode="enforce")
    label_node(node, max_mode="strict")
    await node.start_agent("--max-mode", "audit", "--mode", "enforce")
    await run_web(node)
    assert isolation(node) == ("True", "Enforced")
    assert is_closed()
    return node


async def test_label_of_podgates_namespace_switches_off_whatever_other_labels_allow(
    closed: Node,
) -> None:
    node, installation = closed, pins.Pins(closed.operator.bpffs)
    before = attached.everything(installation)
    label_cluster(node, "off")
    await until_off(node)
    assert attached.everything(installation) == []
    assert is_open()
    await node.until("its condition", lambda: isolation(node) == ("True", "Off"))
    assert "limited to off by the label podgate.io/max-mode of podgate's namespace" in message(node)

    label_cluster(node, None)
    await node.report("back", isolated_as("Enforced"))
    await node.until("all of it", lambda: attached.everything(installation) == before)
    assert is_closed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_restart_without_api_server_stays_off(closed: Node, number: signal.Signals) -> None:
    node, installation = closed, pins.Pins(closed.operator.bpffs)
    label_cluster(node, "off")
    await node.report("off", is_off)
    # What the next agent knows of it.
    saved = node.operator.run_directory / "state" / "pods.json"
    label = '"podgate.io/max-mode":"off"'
    await node.until("its state", lambda: saved.exists() and label in saved.read_text())
    await node.stop_agent(number)
    await node.stop_api()
    lines = len(list(node.operator.log_lines()))
    await node.start_agent("--max-mode", "audit", "--mode", "enforce")
    await until_off(node)
    assert attached.everything(installation) == []
    assert is_open()
    events = {line["event"] for line in list(node.operator.log_lines())[lines:]}
    assert not events & {Event.INTERFACE_GATED.key, Event.DEFAULT_DENY_READY.key}

    await node.start_api()
    label_cluster(node, None)
    await node.report("back", isolated_as("Enforced"))
    assert is_closed()


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "dead"])
async def test_pods_start_without_gates_and_are_ready_while_podgate_is_off(
    closed: Node, tmp_path: pathlib.Path, is_running: bool
) -> None:
    """Also with podgate-cni and strictStart, which otherwise holds pods back."""
    node, installation = closed, pins.Pins(closed.operator.bpffs)
    await node.install_plugin(calling.build(tmp_path / "podgate-cni"), "--cni-strict-start")
    if is_running:
        label_cluster(node, "off")
        await until_off(node)
        state = node.operator.run_directory / "cni.json"
        await node.until("the plugin's state", lambda: '"mode":"off"' in state.read_text())
    else:
        await node.stop_agent(signal.SIGKILL)
        directories = ("--run-directory", str(node.operator.run_directory))
        bpffs = ("--bpffs", str(node.operator.bpffs))
        done = await asyncio.to_thread(node.operator.run, "off", "--node", *directories, *bpffs)
        assert done.returncode == 0, done.stderr
    node.create("later")
    await node.run_pod("later")
    assert is_open(SECOND)
    assert attached.everything(installation) == []
    if is_running:
        await node.ready("later")
        assert isolation(node, "later") == ("True", "Off")

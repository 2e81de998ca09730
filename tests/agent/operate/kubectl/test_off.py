"""`kubectl podgate off` and `on`: the label, and a verdict for each node."""

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin

pytestmark = pytest.mark.usefixtures("off_without_waiting")

DONE = {"maxMode": "off", "maxModeFrom": "the label", "inForce": []}
BUSY = {"maxMode": "off", "maxModeFrom": "the label", "inForce": ["gates", "hooks"]}
ON = {"maxMode": "strict", "maxModeFrom": "--max-mode", "inForce": ["gates"]}


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "--timeout", "1", *arguments])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> KubectlStandin:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("label")
    kubectl.respond("exec", "agent-a", output=DONE)
    kubectl.respond("exec", "agent-b", output=DONE)
    return kubectl


def test_off_labels_podgates_namespace_and_reads_each_node(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, "off") == 0
    assert nodes.calls("label", "namespace", "podgate", "podgate.io/max-mode=off", "--overwrite")
    assert lines(capsys) == ["NODE STATE", "a off", "b off"]


def test_node_with_something_in_force_is_listed_with_it(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", output=BUSY)
    assert run(nodes, "off") == 1
    assert lines(capsys)[1:] == ["a off", "b off, but still in force: gates, hooks"]
    # What is done is not queried again, and what is not, each half second of the one.
    assert len(nodes.calls("exec", "agent-a")) == 1
    assert len(nodes.calls("exec", "agent-b")) == 3


def test_node_that_needs_time_is_awaited(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.respond("exec", "agent-b", output=BUSY)
    monkeypatch.setattr(
        "agent.operate.kubectl.off.time.sleep",
        lambda _: nodes.respond("exec", "agent-b", output=DONE),
    )
    assert main.main(["--kubectl", nodes.command, "--timeout", "60", "off"]) == 0
    assert lines(capsys)[1:] == ["a off", "b off"]
    assert len(nodes.calls("exec", "agent-b")) == 2


def test_node_without_an_agent_is_listed(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.serve_nodes("a", "b", without_agent=["b"])
    assert run(nodes, "off") == 1
    captured = capsys.readouterr()
    assert "no agent runs on this node" in captured.out
    assert "1 of 2 nodes off" in captured.err
    assert "podgate off --node" in captured.err


def test_off_of_one_node_labels_and_queries_that_one(nodes: KubectlStandin) -> None:
    assert run(nodes, "off", "--node", "a") == 0
    assert nodes.calls("label", "node", "a", "podgate.io/max-mode=off")
    assert not nodes.calls("exec", "agent-b")


def test_on_removes_the_label_and_names_what_keeps_a_node_off(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-a", output=ON)
    nodes.respond("exec", "agent-b", output=DONE | {"maxModeFrom": "'podgate off --node'"})
    assert run(nodes, "on") == 1
    assert nodes.calls("label", "namespace", "podgate", "podgate.io/max-mode-")
    assert lines(capsys)[1:] == ["a on", "b at most off, by 'podgate off --node'"]


def test_rejected_label_is_the_only_thing_that_is_done(nodes: KubectlStandin) -> None:
    nodes.respond("label", error="Error from server (Forbidden): namespaces is forbidden\n")
    assert run(nodes, "off") == 1
    assert not nodes.calls("exec")

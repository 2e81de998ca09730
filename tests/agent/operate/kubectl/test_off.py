"""`kubectl podgate off` and `on`: the label, and a verdict for each node."""

import json
import re

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin, node

pytestmark = pytest.mark.usefixtures("off_without_waiting")

OS = "kubernetes.io/os"
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


def test_off_of_all_nodes_leaves_nothing_to_do_on_others(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, "off") == 0
    assert re.fullmatch(r"2 of 2 nodes off in \d+\.\d s\.\n", capsys.readouterr().err)


def test_node_with_something_in_force_is_listed_with_it(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", output=BUSY)
    nodes.respond("exec", "agent-b", "--node", error="podgate: it is left\n")
    assert run(nodes, "off") == 1
    assert lines(capsys)[1:] == ["a off", "b off, but still in force: gates, hooks"]
    # What is done is not queried again, and what is not, each half second of the one.
    assert len(nodes.calls("exec", "agent-a")) == 1
    assert len(nodes.calls("exec", "agent-b", "status")) == 3


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
    nodes.respond("create", error="Error from server (Forbidden): pods is forbidden\n")
    assert run(nodes, "off") == 1
    captured = capsys.readouterr()
    assert "no agent runs on this node" in captured.out
    done, others = captured.err.splitlines()
    assert done.startswith("1 of 2 nodes off in ")
    assert others == "On each of the others run 'podgate off --node'; see docs/off.md."


def test_node_without_an_agent_is_switched_off_by_a_pod_that_is_made_and_deleted(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.serve_nodes("a", "b", without_agent=["b"])
    pod = nodes.serve_debug_pod("b")
    nodes.respond("exec", pod, "off", output="podgate is off on this node")
    assert run(nodes, "off") == 0
    captured = capsys.readouterr()
    assert captured.out == "NODE  STATE\na     off\nb     off, by 'podgate off --node'\n"
    done, back = captured.err.splitlines()
    assert done.startswith("2 of 2 nodes off in ")
    assert back == "No agent follows there; back later with: kubectl podgate on b"
    ((_, content),) = nodes.calls("create")
    made = json.loads(content)
    assert made["spec"]["nodeName"] == "b"
    assert made["spec"]["hostNetwork"]
    assert made["spec"]["containers"][0]["image"] == "podgate:1"
    assert nodes.calls("delete", "pod", pod)


def test_node_that_left_the_daemonset_is_not_forgotten(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its gates are in force, so "1 of 1 nodes off" would be wrong."""
    nodes.serve_nodes("a")
    nodes.respond("get", "nodes", output={"items": [node("a"), node("b", **{OS: "other"})]})
    reports = [{"metadata": {"name": name}} for name in ("a", "b")]
    nodes.respond("get", "nodereports.podgate.io", output={"items": reports})
    nodes.respond("create", error="Error from server (Forbidden): pods is forbidden\n")
    assert run(nodes, "off") == 1
    captured = capsys.readouterr()
    assert "b     no agent runs on this node, which the DaemonSet does not select" in captured.out
    assert "1 of 2 nodes off" in captured.err


def test_agent_that_hangs_is_bypassed_in_its_own_container(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", error="podgate: no agent responds\n")
    nodes.respond("exec", "agent-b", "off", output="podgate is off on this node")
    assert run(nodes, "off") == 0
    assert not nodes.calls("create")


def test_unreachable_node_is_named_by_its_node_and_gets_no_pod(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("get", "nodes", output={"items": [node("a"), node("b", ready="Unknown")]})
    refused = "dial tcp 198.18.0.2:10250: connect: connection refused"
    nodes.respond("exec", "agent-b", error=f"Error from server: error dialing backend: {refused}\n")
    assert run(nodes, "off", "a", "b") == 1
    assert lines(capsys)[-1] == (
        "b its Node is NotReady since 2026-11-22T09:00:00Z (Kubelet stopped posting node status)"
    )
    assert not nodes.calls("create")


def test_on_of_a_node_undoes_what_off_did_there(nodes: KubectlStandin) -> None:
    nodes.respond("exec", "agent-a", output=ON)
    assert run(nodes, "on", "a") == 0
    assert nodes.calls("label", "node", "a", "podgate.io/max-mode-")
    assert nodes.calls("exec", "agent-a", "on", "--node")


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
    assert lines(capsys)[1:] == [
        "a on",
        "b at most off, by 'podgate off --node'; undo it with 'kubectl podgate on b'",
    ]


@pytest.mark.parametrize(
    ("ceiling", "origin", "text"),
    [
        ("off", "the label", "a off"),
        ("audit", "the node's label", "a at most audit, by the node's label"),
        ("audit", "--max-mode", "a at most audit, by --max-mode"),
    ],
)
def test_node_with_another_ceiling_has_what_sets_it(
    nodes: KubectlStandin,
    capsys: pytest.CaptureFixture[str],
    ceiling: str,
    origin: str,
    text: str,
) -> None:
    report = {"maxMode": ceiling, "maxModeFrom": origin, "inForce": []}
    nodes.respond("exec", "agent-a", output=report)
    nodes.respond("exec", "agent-a", "off", error="podgate: it is left\n")
    assert run(nodes, "off", "a") == (ceiling != "off")
    assert lines(capsys) == ["NODE STATE", text]


@pytest.mark.parametrize("word", ["off", "on"])
def test_node_that_was_deleted_is_named_and_the_others_are_switched(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    nodes.respond("exec", "agent-b", output=DONE if word == "off" else ON)
    missing = 'Error from server (NotFound): nodes "a-gone" not found'
    nodes.respond("label", "a-gone", error=f"{missing}\n")
    nodes.respond("exec", "agent-b", "--node", output="done")
    assert run(nodes, word, "a-gone", "b") == 1
    assert nodes.calls("label", "node", "b")
    assert lines(capsys)[1:] == [f"a-gone its Node cannot be labelled: {missing}", f"b {word}"]


@pytest.mark.parametrize("report", [{}, {"maxMode": None}, "Usage: podgate"])
def test_agent_whose_answer_is_not_readable_is_switched_off_by_command(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str], report: object
) -> None:
    nodes.respond("exec", "agent-b", output=report)
    nodes.respond("exec", "agent-b", "off", output="podgate is off on this node")
    assert run(nodes, "off") == 0
    assert lines(capsys)[-1] == "b off, by 'podgate off --node'"


def test_rejected_label_is_the_only_thing_that_is_done(nodes: KubectlStandin) -> None:
    nodes.respond("label", error="Error from server (Forbidden): namespaces is forbidden\n")
    assert run(nodes, "off") == 1
    assert not nodes.calls("exec")


def test_on_that_a_node_rejects_is_named_although_its_agent_is_on(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-a", output=ON)
    nodes.respond("exec", "agent-a", "--node", error="podgate: read-only file system\n")
    assert run(nodes, "on", "a") == 1
    assert lines(capsys)[1:] == ["a podgate: read-only file system"]

"""Requests by the kubectl command, and commands in the agents' pods."""

import pathlib

import pytest

from agent.kubectl.cluster import Cluster, KubectlError
from tests.agent.kubectl.standin import KubectlStandin, agent_pod


def test_each_node_is_queried_in_its_agents_pod(kubectl: KubectlStandin, cluster: Cluster) -> None:
    kubectl.serve_nodes("b", "a")
    kubectl.respond("exec", "agent-a", output="of a\n")
    kubectl.respond("exec", "agent-b", output="of b\n")
    answers = cluster.query_nodes("podgate", "status")
    assert [(answer.node, answer.output) for answer in answers] == [
        ("a", "of a\n"),
        ("b", "of b\n"),
    ]


def test_node_without_an_agent_has_a_problem(kubectl: KubectlStandin, cluster: Cluster) -> None:
    kubectl.serve_nodes("a", "b", without_agent=["b"])
    kubectl.respond("exec", "agent-a", output="of a\n")
    problems = {answer.node: answer.problem for answer in cluster.query_nodes("podgate", "status")}
    assert problems == {"a": "", "b": "no agent runs on this node"}


def test_failed_command_is_a_problem_of_its_node_only(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", output="of a\n")
    kubectl.respond("exec", "agent-b", error="line one\npodgate: no agent responds\n")
    answers = {answer.node: answer for answer in cluster.query_nodes("podgate", "status")}
    assert answers["a"].output == "of a\n"
    assert answers["b"].problem == "podgate: no agent responds"


def test_content_is_the_commands_standard_input(kubectl: KubectlStandin, cluster: Cluster) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output="")
    cluster.query_nodes("podgate", "suggest", content="a policy")
    assert [content for _, content in kubectl.calls("exec", "--stdin")] == ["a policy"]


def test_youngest_agent_of_a_roll_out_is_queried(kubectl: KubectlStandin, cluster: Cluster) -> None:
    kubectl.serve_nodes("a")
    younger = agent_pod("a")
    younger["metadata"] |= {"name": "younger", "creationTimestamp": "2026-11-22T11:00:00Z"}
    kubectl.respond("get", "pods", output={"items": [younger, agent_pod("a")]})
    assert [agent.name for agent in cluster.agents()] == ["younger"]


def test_pods_of_others_and_ended_ones_are_no_agents(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    controller, ended = agent_pod("a"), agent_pod("a")
    controller["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "podgate"}]
    ended["status"]["phase"] = "Failed"
    kubectl.respond("get", "pods", output={"items": [controller, ended]})
    assert cluster.agents() == []


def test_missing_kubectl_is_one_sentence(tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "kubectl")
    with pytest.raises(KubectlError, match=r"is not installed; install it, or name it with --kube"):
        Cluster([missing]).items("pods")


def test_request_that_hangs_ends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "kubectl"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    hanging.chmod(0o755)
    monkeypatch.setattr("agent.kubectl.cluster._MARGIN_SECONDS", 0.0)
    with pytest.raises(KubectlError, match="no response within"):
        Cluster([str(hanging)], timeout_seconds=0.1).items("pods")

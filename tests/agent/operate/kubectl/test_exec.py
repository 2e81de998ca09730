"""`kubectl podgate exec`: a command of podgate on a node, with or without its agent."""

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "--timeout", "1", "exec", *arguments])


def test_command_runs_in_the_agents_container(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", "maps", "--raw", output="all maps\n")
    assert run(kubectl, "a", "maps", "--raw") == 0
    assert run(kubectl, "a", "--", "maps", "--raw") == 0
    assert capsys.readouterr().out == "all maps\n" * 2
    assert not kubectl.calls("create")


def test_command_runs_in_a_pod_of_its_own_where_the_agent_crashes(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", without_agent=["a"])
    pod = kubectl.serve_debug_pod("a")
    kubectl.respond("exec", pod, "doctor", output="findings\n", exit_status=1)
    assert run(kubectl, "a", "doctor") == 1
    assert capsys.readouterr().out == "findings\n"
    assert kubectl.calls("delete", "pod", pod)


def test_failure_without_output_keeps_its_sentence_and_status(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", error="podgate: no such map\n", exit_status=2)
    assert run(kubectl, "a", "maps", "nothing") == 2
    assert "a: podgate: no such map" in capsys.readouterr().err


def test_node_that_cannot_be_reached_has_status_3(kubectl: KubectlStandin) -> None:
    kubectl.serve_nodes("a", without_agent=["a"])
    kubectl.respond("create", error="Error from server (Forbidden): no\n", exit_status=1)
    assert run(kubectl, "nowhere", "status") in (1, 3)


def test_any_exit_status_of_the_command_is_an_answer(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", "probe", output="answer\n", exit_status=255)
    assert run(kubectl, "a", "probe") == 255
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("answer\n", "")

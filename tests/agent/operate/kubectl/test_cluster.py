"""Requests by the kubectl command, and commands in the agents' pods."""

import pathlib
import subprocess
import threading
from typing import Any

import pytest

from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import Cluster, KubectlError, NodeAnswer, ReadAnswer
from agent.operate.kubectl.debug_pods import DebugPods
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod, node


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
    lines = "podgate: no agent responds\ncommand terminated with exit code 1\n"
    kubectl.respond("exec", "agent-b", error=lines)
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


def test_new_version_that_crashes_does_not_hide_the_previous_agent(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a")
    younger = agent_pod("a")
    younger["metadata"] |= {"name": "younger", "creationTimestamp": "2026-11-22T11:00:00Z"}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    status = [{"name": "agent", "restartCount": 4, "state": state}]
    younger["status"]["containerStatuses"] = status
    kubectl.respond("get", "pods", output={"items": [younger, agent_pod("a")]})
    kubectl.respond("exec", "agent-a", output="of a\n")
    (answer,) = cluster.query_nodes("podgate", "status")
    assert (answer.output, answer.problem) == ("of a\n", "")


def test_node_that_does_not_exist_is_named_so_and_gets_no_pod(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a")
    makers = DebugPods(cluster)
    (answer,) = cluster.query_nodes("podgate", "status", nodes=["typo"], debug_pods=makers)
    assert answer.problem == "there is no Node of this name"
    assert not kubectl.calls("create")


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
    with pytest.raises(KubectlError) as failed:
        Cluster([missing, "--context=x"]).items("pods")
    text = f"{missing} is not installed; install it, or name it with --kubectl"
    assert str(failed.value) == text
    with pytest.raises(KubectlError) as failed:
        Cluster([missing]).open("get", "pods")
    assert str(failed.value) == text


def test_request_that_hangs_ends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "kubectl"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    hanging.chmod(0o755)
    monkeypatch.setattr("agent.operate.kubectl.cluster._MARGIN_SECONDS", 0.0)
    with pytest.raises(KubectlError, match="no response within"):
        Cluster([str(hanging)], timeout_seconds=0.1).items("pods")


def test_output_of_a_command_that_answers_with_no_is_an_answer(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a", "b")
    ended = "command terminated with exit code 1\n"
    kubectl.respond("exec", "agent-a", output="no\n", error=ended)
    kubectl.respond("exec", "agent-b", error=f"podgate: it failed\n{ended}")
    a, b = cluster.query_nodes("podgate", "explain", answers_with=(0, 1))
    assert (a.output, a.problem, a.exit_status) == ("no\n", "", 1)
    assert (b.output, b.problem, b.exit_status) == ("", "podgate: it failed", 1)


def test_agent_that_does_not_run_is_named_by_its_containers_state(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a")
    crashing = agent_pod("a")
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
    crashing["status"]["containerStatuses"] = [
        {"name": "agent", "restartCount": 3, "state": waiting}
    ]
    kubectl.respond("get", "pods", output={"items": [crashing]})
    kubectl.respond(
        "exec", error='error: unable to upgrade connection: container not found ("a")\n'
    )
    (answer,) = cluster.query_nodes("podgate", "status")
    assert answer.problem == "its agent does not run: CrashLoopBackOff after 3 restarts"


def test_command_of_a_later_version_is_one_sentence(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a")
    usage = "Usage: podgate [OPTIONS] COMMAND [ARGS]...\n\nError: No such command 'explain'.\n"
    error = f"{usage}command terminated with exit code 2\n"
    kubectl.respond("exec", error=error, exit_status=2)
    (answer,) = cluster.query_nodes("podgate", "explain")
    assert answer.problem == "its agent is of a version without 'podgate explain'"


def test_node_that_hangs_delays_no_other(
    tmp_path: pathlib.Path, kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-b", output="of b\n")
    selective = tmp_path / "selective"
    script = (
        f'#!/bin/sh\ncase "$*" in *agent-a*) exec sleep 1000;; esac\nexec {kubectl.command} "$@"\n'
    )
    selective.write_text(script, encoding="ascii")
    selective.chmod(0o755)
    run, is_answered = subprocess.run, threading.Event()

    def run_in_turn(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The time limit of the node that hangs begins when the other has answered."""
        if "agent-a" in command:
            assert is_answered.wait(30)
            options["timeout"] = 0.1
        done: subprocess.CompletedProcess[str] = run(command, **options)
        if "agent-b" in command:
            is_answered.set()
        return done

    monkeypatch.setattr("agent.operate.kubectl.cluster.subprocess.run", run_in_turn)
    hanging, answering = Cluster([str(selective)]).query_nodes("podgate", "status")
    assert "no response within" in hanging.problem
    assert answering.output == "of b\n"


DIALLED = "Error from server: error dialing backend: dial tcp 198.18.0.2:10250: i/o timeout\n"


def test_node_that_cannot_be_reached_is_named_by_its_state(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", error=DIALLED)
    (answer,) = cluster.query_nodes("podgate", "status")
    assert answer.problem == (
        "its kubelet does not respond: dial tcp 198.18.0.2:10250: i/o timeout"
    )
    kubectl.respond("get", "nodes", output={"items": [node("a", ready="Unknown")]})
    (answer,) = cluster.query_nodes("podgate", "status")
    assert answer.problem.startswith("its Node is NotReady since 2026-11-22T09:00:00Z")


def test_command_in_a_pod_has_the_timeout_and_no_more(tmp_path: pathlib.Path) -> None:
    seconds: list[float] = []
    kubectl = KubectlStandin(tmp_path)
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output="of a\n")

    class Recorded(Cluster):
        def run(self, *arguments: str, **options: Any) -> str:
            if arguments[0] == "exec":
                seconds.append(self.timeout_seconds + options["margin_seconds"])
            return super().run(*arguments, **options)

    Recorded([kubectl.command], timeout_seconds=7.0).query_nodes("podgate", "status")
    assert seconds == [7.0]


def test_users_without_the_right_to_list_reports_read_what_is_missing(
    kubectl: KubectlStandin, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    error = "Error from server (Forbidden): nodereports.podgate.io is forbidden\n"
    kubectl.respond("get", "nodereports.podgate.io", error=error)
    assert cluster.nodes() == cluster.nodes() == ["a"]
    warning = "Nodes that the DaemonSet does not select are missing"
    assert capsys.readouterr().err.count(warning) == 1
    kubectl.respond("get", "nodereports.podgate.io", error="the server was lost\n")
    with pytest.raises(KubectlError, match="lost"):
        cluster.nodes()


def test_users_without_the_right_to_list_nodes_have_those_with_agents(
    kubectl: KubectlStandin, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("b", "a", "c", without_agent=["c"])
    error = "Error from server (Forbidden): nodes is forbidden"
    kubectl.respond("get", "nodes", error=f"{error}\n")
    assert cluster.nodes() == ["a", "b"]
    assert capsys.readouterr().err == f"Nodes without an agent are missing: {error}\n"
    kubectl.respond("get", "nodes", error="the server was lost\n")
    with pytest.raises(KubectlError, match="lost"):
        cluster.nodes()


def test_requests_and_commands_in_pods_have_their_arguments(kubectl: KubectlStandin) -> None:
    cluster = Cluster([kubectl.command, "--context=x"], namespace="ns", timeout_seconds=7.4)
    kubectl.respond("get", "pods", output={"items": [{"a": 1}]})
    kubectl.respond("get", "--output=name", output="pod/a\npod/b\n")
    kubectl.respond("exec", output="yes\n")
    agents = [AgentPod("agent-a", "a", is_ready=False), AgentPod("agent-b", "b")]
    assert cluster.items("pods", "-l", "x=y") == [{"a": 1}]
    assert cluster.names("pods") == ["a", "b"]
    found = cluster.query_nodes("podgate", "status", nodes=["b", "a"], agents=agents, content="x")
    assert found == [NodeAnswer("a", "yes\n"), NodeAnswer("b", "yes\n", is_ready=True)]
    place = ["--namespace=ns", "--container=agent"]
    calls = [call for call, _ in kubectl.calls()]
    assert calls[:2] == [
        ["--context=x", "get", "pods", "-l", "x=y", "--output=json", "--request-timeout=7s"],
        ["--context=x", "get", "pods", "--output=name", "--request-timeout=7s"],
    ]
    assert sorted(calls[2:]) == [
        ["--context=x", "exec", "--stdin", *place, f"agent-{node}", "--", "podgate", "status"]
        for node in ("a", "b")
    ]


def test_answer_of_kubectl_that_is_no_object_is_an_error(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.respond("get", output=[1])
    with pytest.raises(KubectlError, match=r"^kubectl get pods printed no object$"):
        cluster.items("pods")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("podgate: no\ncommand terminated with exit code 7\n", "podgate: no"),
        ("command terminated with exit code 7\n", "command terminated with exit code 7"),
        ("podgate: one\npodgate: two\n", "podgate: two"),
        ("", "kubectl exec ended with 7"),
        ("Error from server (Forbidden): no\n", "Error from server (Forbidden): no"),
        ("error: error dialing backend: refused\n", "its kubelet does not respond: refused"),
        ("error: timed out\n", "error: timed out"),
        (
            "Error from server (InternalError): error dialing backend: refused\n",
            "its kubelet does not respond: refused",
        ),
    ],
)
def test_command_that_fails_has_its_last_words(
    kubectl: KubectlStandin, cluster: Cluster, error: str, problem: str
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output="part\n", error=error, exit_status=7)
    assert cluster.query_nodes("podgate", "status") == [
        NodeAnswer("a", problem=problem, exit_status=7)
    ]
    assert cluster.query_nodes("podgate", "status", answers_with=[7]) == [
        NodeAnswer("a", "part\n", exit_status=7, is_ready=True)
    ]


class _Reader:
    """Agents that answer users, or do not."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def get(self, agent: AgentPod, answer: str, **query: str) -> str:
        if self._problem:
            raise KubectlError(self._problem)
        return f"{agent.name} {answer} {query}"


@pytest.mark.parametrize(
    ("reader", "error", "expected"),
    [
        (
            _Reader(),
            "",
            NodeAnswer("a", "agent-a explain {'pod': 'shop/web'}", is_ready=True),
        ),
        (_Reader("no port"), "", NodeAnswer("a", "by exec\n", is_ready=True)),
        (
            _Reader("no port"),
            "It is lost.\n",
            NodeAnswer("a", problem="It is lost.", exit_status=1),
        ),
        (
            _Reader("no port"),
            "Error from server (Forbidden): no\n",
            NodeAnswer(
                "a",
                problem="it gives no answer to you: no port; nor by exec: Error from server "
                "(Forbidden): no",
                exit_status=1,
            ),
        ),
    ],
)
def test_agent_is_read_before_a_command_runs_in_its_pod(
    kubectl: KubectlStandin, cluster: Cluster, reader: _Reader, error: str, expected: NodeAnswer
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output="" if error else "by exec\n", error=error)
    cluster.reader = reader
    read = ReadAnswer("explain", {"pod": "shop/web"})
    assert cluster.query_nodes("podgate", "explain", read=read) == [expected]
    # What cannot be read so is a command in any case.
    (found,) = cluster.query_nodes("podgate", "explain")
    assert found.output == ("" if error else "by exec\n")


def test_agent_on_a_node_that_is_not_selected_is_queried(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    """Its pod is about to be deleted."""
    kubectl.serve_nodes("a")
    pods = {"items": [agent_pod("a"), agent_pod("b")]}
    kubectl.respond("get", "pods", "--namespace=podgate", output=pods)
    assert cluster.nodes() == ["a", "b"]


def test_command_that_fails_without_a_word_has_its_name_and_status(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.respond("label", exit_status=7)
    with pytest.raises(KubectlError, match=r"^kubectl label ended with 7$"):
        cluster.run("label", "namespace", "shop", "a=b")


def test_node_that_never_had_an_agent_is_not_selected(
    kubectl: KubectlStandin, cluster: Cluster
) -> None:
    kubectl.serve_nodes()
    kubectl.respond("get", "nodes", "--field-selector=metadata.name=gone", output={"items": []})
    (answer,) = cluster.query_nodes("podgate", "status", nodes=["gone"])
    assert not answer.is_selected

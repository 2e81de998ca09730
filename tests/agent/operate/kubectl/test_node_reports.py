"""Nodes of a large cluster that are in order by their NodeReports, and `status` of these."""

import argparse
import re
import sys
from typing import Any

import pytest

from agent.kube import node_report
from agent.operate.kubectl import main, node_reports, status
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.reporting import REPORT, encoded
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod, node

Json = dict[str, Any]
DAEMONSET: Json = {
    "metadata": {"name": "podgate"},
    "spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}},
}


def report(name: str, **summary: object) -> Json:
    """Of a node in order, but for what is given."""
    found = {
        **{"defaultMode": "audit", "maxMode": "strict", "hasKubelet": True},
        **{"desired": {"enforce": 3}, "inForce": {"enforce": 3}},
        **summary,
    }
    return {"metadata": {"name": name}, "status": {"agentVersion": "0.1.0", "summary": found}}


def in_order(of: Json, pod: Json | None = None, of_node: Json | None = None) -> bool:
    """Whether the node a is, by its report, its agent's pod and its Node."""
    found = node_reports.fleet(DAEMONSET, [of_node or node("a")], [pod or agent_pod("a")], [of])
    assert [*found.in_order, *found.others] == ["a"]
    return bool(found.in_order)


def test_node_is_in_order_by_its_report() -> None:
    assert in_order(report("a"))
    found = node_reports.fleet(DAEMONSET, [node("a")], [agent_pod("a")], [report("a")])
    status_of_a = found.in_order["a"]
    assert (status_of_a.default_mode, status_of_a.max_mode) == ("audit", "strict")
    assert in_order(report("a", desired={}, inForce={}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"problems": 1},
        {"hasKubelet": False},
        {"inForce": {"enforce": 2}},
        {"inForce": {"enforce": 2, "audit": 1}},
    ],
)
def test_node_with_a_problem_is_for_its_agent_to_answer(wrong: Json) -> None:
    assert not in_order(report("a", **wrong))


def test_report_without_a_summary_is_not_enough() -> None:
    assert not in_order({"metadata": {"name": "a"}, "status": {"policies": {"revision": "r"}}})
    assert not in_order({"metadata": {"name": "a"}})


def test_report_does_not_count_while_its_agent_or_node_is_not_ready() -> None:
    pod = agent_pod("a")
    pod["status"]["conditions"][0]["status"] = "False"
    assert not in_order(report("a"), pod)
    pod = agent_pod("a")
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    assert not in_order(report("a"), pod)
    assert not in_order(report("a"), of_node=node("a", ready="Unknown"))


def test_nodes_without_agent_or_report_are_among_the_others() -> None:
    found = node_reports.fleet(
        DAEMONSET,
        [node("a"), node("b"), node("c")],
        [agent_pod("a"), agent_pod("b")],
        [report("a"), report("c"), report("gone")],
    )
    assert list(found.in_order) == ["a"]
    assert found.others == ["b", "c", "gone"]


PODS = "/api/v1/namespaces/podgate/pods"
SELECTOR = "labelSelector=app.kubernetes.io%2Fname%3Dpodgate&"


def serve(kubectl: KubectlStandin, path: str, items: list[Json], *, query: str = "") -> None:
    """The list of this path, in one page."""
    kubectl.respond("get", "--raw", f"{path}?{query}limit=1000", output={"items": items})


@pytest.fixture
def large(kubectl: KubectlStandin, monkeypatch: pytest.MonkeyPatch) -> KubectlStandin:
    """Three nodes count as many; one of them has a finding."""
    monkeypatch.setattr(node_reports, "FEW", 2)
    kubectl.serve_nodes("a", "b", "c")
    daemonset = {
        **DAEMONSET,
        "status": {"desiredNumberScheduled": 3, "updatedNumberScheduled": 3},
    }
    kubectl.respond("get", "daemonset", output=daemonset)
    reports = [report("a"), report("b"), report("c", problems=1)]
    serve(kubectl, node_reports.REPORTS, reports)
    serve(kubectl, node_reports.NODES, [node(name) for name in "abc"])
    serve(kubectl, PODS, [agent_pod(name) for name in "abc"], query=SELECTOR)
    kubectl.respond("exec", "agent-c", output=encoded(REPORT))
    return kubectl


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "status", *arguments])


def test_only_agents_of_nodes_with_problems_are_queried(
    large: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(large) == 0
    printed = capsys.readouterr()
    assert {word for words, _ in large.calls("exec") for word in words if "agent-" in word} == {
        "agent-c"
    }
    assert "3 nodes: 3 in order. Pods: 6/6 enforce." in printed.out
    assert "2 nodes by their NodeReports" in printed.err
    rows = [line.split() for line in printed.out.splitlines() if line.startswith(("a ", "b "))]
    assert rows == [[name, "0.1.0", "yes", "yes", "0", "3/3", "enforce"] for name in ("a", "b")]


def test_kubectl_decodes_none_of_the_long_lists(large: KubectlStandin) -> None:
    """That takes most of the CPU time in a large cluster."""
    run(large)
    long = ("nodes", "pods", "nodereports.podgate.io")
    assert [words for words, _ in large.calls("get", "--output=json") if words[1] in long] == []


def test_lists_of_several_pages_are_read_whole(kubectl: KubectlStandin, cluster: Cluster) -> None:
    page = f"{node_reports.NODES}?limit=1000"
    first = {"metadata": {"continue": "a/b"}, "items": [node("a")]}
    kubectl.respond("get", "--raw", page, output=first)
    kubectl.respond("get", "--raw", f"{page}&continue=a%2Fb", output={"items": [node("b")]})
    found = node_reports.items(cluster, node_reports.NODES)
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]


def test_paths_are_those_of_the_agent() -> None:
    """The plugin has nothing of agent/kube."""
    assert node_reports.REPORTS == node_report.PATH


@pytest.mark.parametrize("option", [("--fresh",), ("-o", "json"), ("-o", "wide")])
def test_all_agents_answer_where_all_is_shown(
    large: KubectlStandin, option: tuple[str, ...]
) -> None:
    for name in ("a", "b"):
        large.respond("exec", f"agent-{name}", output=encoded(REPORT))
    run(large, *option)
    assert len(large.calls("exec", "status")) == 3


def test_all_agents_answer_users_who_may_not_read_nodes(large: KubectlStandin) -> None:
    for words in (("nodes",), ("--raw", f"{node_reports.NODES}?limit=1000")):
        large.respond("get", *words, error="Error from server (Forbidden): nodes is forbidden\n")
    for name in ("a", "b"):
        large.respond("exec", f"agent-{name}", output=encoded(REPORT))
    run(large)
    assert len(large.calls("exec", "status")) == 3


@pytest.mark.parametrize(("is_terminal", "start"), [(False, ""), (True, "\x1b[H\x1b[J\n")])
def test_watch_shows_it_again_and_survives_an_api_server_that_is_away(
    large: KubectlStandin,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    start: str,
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            large.respond("get", error="The connection to the server was refused\n")
        if len(waited) == 2:
            raise KeyboardInterrupt

    arguments = argparse.Namespace(
        **{"watch": 7.0, "node": None, "selector": None, "fresh": False},
        **{"output": "table", "problems": False},
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with pytest.raises(KeyboardInterrupt):
        status.run(arguments, cluster, sleep=sleep)
    printed = capsys.readouterr()
    assert waited == [7.0, 7.0]
    time = re.escape(start) + r"\d\d:\d\d:\d\d \S+\n"
    assert re.fullmatch(rf"{time}3 nodes: [^\x1b]*\n\n{time}\n", printed.out)
    assert "The connection to the server was refused" in printed.err


@pytest.mark.parametrize(("text", "seconds"), [((), None), (("-w",), 5.0), (("-w", "30"), 30.0)])
def test_time_between_is_five_seconds(text: tuple[str, ...], seconds: float | None) -> None:
    assert main.parser().parse_args(["status", *text]).watch == seconds

"""`kubectl podgate suggest`: all nodes together, and what is missing."""

import dataclasses
import datetime
import json
from typing import Any

import pytest

from agent.operate.kubectl import main, observed
from tests.agent.operate.kubectl.observing import Nodes
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.policy.observing import flows

A = "/system.slice/a.service"


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> Nodes:
    made = Nodes(kubectl, "one", "two")
    made.see("one", flows(A))
    return made


def suggest(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "suggest", *arguments])


def test_what_all_nodes_have_observed_is_merged_by_one_agent(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggest(kubectl, "-n", "shop", "--since", "12h", "--min-count", "3") == 0
    captured = capsys.readouterr()
    assert captured.out == "merged\n"
    assert captured.err.splitlines() == ["one: 24.0 h observed", "two: 24.0 h observed"]
    ((arguments, content),) = kubectl.calls("--from=-")
    assert {"--namespace=shop", "--since=12h", "--min-count=3", "--output=yaml"} <= set(arguments)
    sent = json.loads(content)
    assert [node["node"] for one in sent for node in one["nodes"]] == ["one", "two"]
    assert [len(node["flows"]) for one in sent for node in one["nodes"]] == [1, 0]


def test_less_than_a_day_is_not_enough(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.see("two", unobserved_seconds=3600.0)
    assert suggest(kubectl) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "two has observed 23.0 h, less than a day." in captured.err
    assert suggest(kubectl, "--yes") == 0
    assert capsys.readouterr().out == "merged\n"


def test_node_that_is_younger_than_a_day_delays_nothing(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.created["two"] = "2026-01-01T12:00:00Z"
    nodes.see("two", unobserved_seconds=12 * 3600.0)
    assert suggest(kubectl) == 0
    assert "two: 12.0 h observed, a node younger than a day" in capsys.readouterr().err


def test_a_cluster_of_young_nodes_is_not_enough(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in nodes.names:
        nodes.created[name] = "2026-01-01T12:00:00Z"
        nodes.see(name, unobserved_seconds=12 * 3600.0)
    assert suggest(kubectl) == 1
    assert "No node has observed a day." in capsys.readouterr().err


def test_node_that_does_not_respond_is_missing(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.respond("exec", "agent-one", error="container not found\n")
    assert suggest(kubectl) == 1
    assert "one: container not found; what it has seen is missing." in capsys.readouterr().err
    assert suggest(kubectl, "--yes") == 0
    ((arguments, _),) = kubectl.calls("--from=-")
    assert "agent-two" in arguments


def test_without_any_agent_there_is_one_sentence(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.respond("exec", error="container not found\n")
    assert suggest(kubectl, "--yes") == 1
    assert capsys.readouterr().err.endswith(
        "kubectl podgate: no agent responded; see 'kubectl podgate status'\n"
    )


def test_what_no_policy_carries_over_is_listed(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = {"httpGet": {"host": "198.18.0.9", "port": 80}}
    containers = [
        {
            "name": "app",
            "readinessProbe": probe,
            "livenessProbe": {"httpGet": {"port": 80}},
            "lifecycle": {"preStop": {"tcpSocket": {"host": "db", "port": 1}}},
            "env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
        }
    ]
    owner = [{"kind": "ReplicaSet", "name": "web-7"}]
    pods = [
        {
            "metadata": {"namespace": namespace, "name": name, "ownerReferences": owner},
            "spec": {"containers": containers, "hostNetwork": name == "host"},
        }
        for namespace, name in (("shop", "a"), ("shop", "b"), ("else", "c"), ("shop", "host"))
    ]
    kubectl.respond("get", "pods", "--all-namespaces", output={"items": pods})
    assert suggest(kubectl, "-n", "shop") == 0
    _, title, *lines = capsys.readouterr().out.splitlines()
    assert title == "# No policy can carry over:"
    assert [line.split(" of container", 1)[0].split(" reads", 1)[0] for line in lines] == [
        "# - shop/web-7: readinessProbe",
        "# - shop/web-7: preStop",
        "# - shop/web-7: container app",
    ]


def test_observed_time_is_in_hours() -> None:
    hours = datetime.timedelta(hours=500)
    node = observed.NodeObservations("a", {"flows": []}, observed=hours)
    assert node.sentence == "a: 500.0 h observed"
    young = dataclasses.replace(node, observed=hours / 1000, is_young=True)
    assert young.sentence == "a: 0.5 h observed, a node younger than a day"
    silent = observed.NodeObservations("a", None, "no agent responds")
    assert silent.sentence == "a: no agent responds"


def test_observations_that_do_not_suffice_have_their_reasons() -> None:
    def of(hours: float, name: str = "a", **fields: Any) -> observed.NodeObservations:
        time = datetime.timedelta(hours=hours)
        return observed.NodeObservations(
            name, **{"output": {"flows": []}, "observed": time, **fields}
        )

    silent = observed.NodeObservations("b", None, "it hangs")
    young = of(1, is_young=True)
    assert observed.problems([of(24), young]) == []
    assert observed.problems([of(23.9)]) == ["a has observed 23.9 h, less than a day."]
    assert observed.problems([young, young]) == ["No node has observed a day."]
    assert observed.problems([silent, young, of(2, "c"), of(48)]) == [
        "b: it hangs; what it has seen is missing.",
        "c has observed 2.0 h, less than a day.",
    ]
    assert (silent.flows, of(1, output={"flows": [{"a": 1}]}).flows) == ([], [{"a": 1}])


def test_filters_are_those_that_the_user_gives(
    kubectl: KubectlStandin, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggest(kubectl, "-n", "a", "-n", "b", "--pod", "web", "--output", "json") == 0
    ((arguments, _),) = kubectl.calls("--from=-")
    assert arguments[arguments.index("--") + 1 :] == [
        *("podgate", "suggest", "--from=-", "--output=json"),
        *("--namespace=a", "--namespace=b", "--pod=web"),
    ]
    assert "No policy can carry over" not in capsys.readouterr().out

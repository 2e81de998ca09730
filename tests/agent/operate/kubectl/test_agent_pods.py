"""Which pod is a node's agent, and what it can answer."""

from typing import Any

import pytest

from agent.operate.kubectl import agent_pods
from agent.operate.kubectl.agent_pods import AgentPod
from tests.agent.operate.kubectl.standin import agent_pod

Json = dict[str, Any]


def changed(name: str = "agent-a", created: str = "2026-11-22T10:00:00Z", **status: Any) -> Json:
    pod = agent_pod("a")
    pod["metadata"] |= {"name": name, "creationTimestamp": created}
    pod["status"] |= status
    return pod


def test_agents_are_in_order_of_nodes() -> None:
    pods = [agent_pod("b"), agent_pod("a")]
    assert agent_pods.youngest(pods, "podgate") == [
        AgentPod("agent-a", "a"),
        AgentPod("agent-b", "b"),
    ]
    assert agent_pods.youngest(pods, "other") == []


@pytest.mark.parametrize(
    ("status", "is_ready", "problem"),
    [
        ({}, True, ""),
        ({"conditions": []}, False, ""),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, False, ""),
        ({"conditions": [{"type": "Other", "status": "True"}]}, False, ""),
        ({"containerStatuses": []}, True, ""),
        ({"containerStatuses": [{"name": "agent", "state": None}]}, True, ""),
        (
            {"containerStatuses": [{"name": "other", "state": {"waiting": {}}, "restartCount": 1}]},
            True,
            "",
        ),
        (
            {
                "containerStatuses": [
                    {"name": "other", "state": {"running": {}}},
                    {"name": "agent", "state": {"terminated": {}}, "restartCount": 2},
                ]
            },
            True,
            "its agent does not run: terminated after 2 restarts",
        ),
    ],
)
def test_agent_is_ready_and_runs_by_its_pod(status: Json, is_ready: bool, problem: str) -> None:
    expected = AgentPod("agent-a", "a", is_ready, problem)
    assert agent_pods.youngest([changed(**status)], "podgate") == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "Pending"},
        {"phase": "Succeeded"},
    ],
)
def test_pod_that_does_not_run_is_no_agent(changes: Json) -> None:
    assert agent_pods.youngest([changed(**changes)], "podgate") == []


def test_pod_without_a_node_or_an_owner_is_no_agent() -> None:
    waiting, alone, others = changed(), changed(), changed()
    del waiting["spec"]["nodeName"], alone["metadata"]["ownerReferences"]
    others["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "other"}]
    assert agent_pods.youngest([waiting, alone, others], "podgate") == []
    others["metadata"]["ownerReferences"].append({"kind": "DaemonSet", "name": "podgate"})
    assert len(agent_pods.youngest([others], "podgate")) == 1


def test_youngest_that_runs_has_the_node() -> None:
    bad = {"name": "agent", "state": {"waiting": {"reason": "Bad"}}, "restartCount": 1}
    pods = [
        changed("old", "2026-11-22T09:00:00Z"),
        changed("new", "2026-11-22T11:00:00Z"),
        changed("bad", "2026-11-22T12:00:00Z", containerStatuses=[bad]),
        changed("middle", "2026-11-22T10:00:00Z"),
    ]
    assert [one.name for one in agent_pods.youngest(pods, "podgate")] == ["new"]
    assert [one.name for one in agent_pods.youngest(pods[2:3], "podgate")] == ["bad"]


@pytest.mark.parametrize(
    ("containers", "port"),
    [
        ([], 0),
        ([{"name": "agent"}], 0),
        ([{"name": "other", "args": ["--metrics-address=:9652"]}], 0),
        ([{"name": "agent", "args": ["--metrics-address=:0"]}], 0),
        ([{"name": "agent", "args": ["--metrics-address=9652"]}], 0),
        ([{"name": "agent", "args": ["--metrics-address=:1", "--metrics-address=:2", "run"]}], 2),
        (
            [{"name": "x"}, {"name": "agent", "args": ["run", "--metrics-address=[::1]:65535"]}],
            65535,
        ),
    ],
)
def test_port_for_readers_is_an_option_of_the_agent(containers: list[Json], port: int) -> None:
    pod = agent_pod("a")
    pod["spec"]["containers"] = containers
    assert [one.read_port for one in agent_pods.youngest([pod], "podgate")] == [port]

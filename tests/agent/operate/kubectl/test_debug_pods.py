"""Pods that stand in for agents that do not run: made once, and always deleted."""

import json
from typing import Any

import pytest

from agent.operate.kubectl import debug_pods, main
from agent.operate.kubectl.cluster import Cluster, KubectlError
from tests.agent.operate.cli.reports import PINNED
from tests.agent.operate.kubectl.reporting import encoded
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.operate.kubectl.test_uninstall import daemonset


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> KubectlStandin:
    kubectl.serve_nodes("b", without_agent=["b"])
    return kubectl


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "--timeout", "1", *arguments])


def test_read_only_commands_run_in_it_only_with_the_option(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = nodes.serve_debug_pod("b")
    nodes.respond("exec", pod, "status", output=encoded(PINNED))
    assert run(nodes, "status") == 3
    assert "broken b: No agent runs on this node.\n" in capsys.readouterr().out
    assert not nodes.calls("create")

    assert run(nodes, "--debug-pods", "status") == 3
    assert "broken b: No agent responds, and 1 gate is in force" in capsys.readouterr().out
    assert nodes.calls("delete", "pod", pod)


@pytest.mark.parametrize("command", [("doctor",), ("drops",)])
def test_doctor_and_drops_run_in_it(nodes: KubectlStandin, command: tuple[str, ...]) -> None:
    pod = nodes.serve_debug_pod("b")
    nodes.respond("exec", pod, *command, output={"findings": [], "sources": []})
    assert run(nodes, "--debug-pods", *command) == 0
    assert nodes.calls("delete", "pod", pod)


def test_pod_that_does_not_start_is_named_and_deleted(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = nodes.serve_debug_pod("b", state="terminated")
    assert run(nodes, "--debug-pods", "status") == 3
    assert f"broken b: Its debug pod {pod} does not run: Because" in capsys.readouterr().out
    assert nodes.calls("delete", "pod", pod)


def test_it_has_what_an_agent_has_and_no_token() -> None:
    found = daemonset()
    agent = found["spec"]["template"]["spec"]
    (container,) = agent["containers"]
    pod = debug_pods.manifest(found, "b")
    (own,) = pod["spec"]["containers"]
    for name in ("image", "securityContext", "volumeMounts"):
        assert own[name] == container[name]
    for name in ("hostNetwork", "hostPID", "volumes", "priorityClassName"):
        assert pod["spec"][name] == agent[name]
    assert pod["spec"]["nodeName"] == "b"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "readinessProbe" not in own
    selector = found["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()
    assert json.dumps(pod)


def test_it_has_nothing_more_of_the_daemonset() -> None:
    agent = {"name": "agent", "image": "podgate:1", "args": ["run"], "env": []}
    spec = {"hostPID": True, "nodeSelector": {}, "containers": [{"name": "other"}, agent]}
    assert debug_pods.manifest({"spec": {"template": {"spec": spec}}}, "b") == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "podgate-debug-",
            "labels": {
                "app.kubernetes.io/name": "podgate-debug",
                "app.kubernetes.io/part-of": "podgate",
            },
        },
        "spec": {
            "hostPID": True,
            "nodeName": "b",
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 600,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "image": "podgate:1",
                    "env": [],
                    "name": "agent",
                    "command": ["/usr/bin/python3", "-c", "import time; time.sleep(600)"],
                }
            ],
        },
    }


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"containerStatuses": [{"state": {"terminated": {"reason": "Error"}}}]}, "Error"),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "Pull"}}}]}, "Pull"),
        ({"reason": "Evicted", "phase": "Failed", "containerStatuses": None}, "Evicted"),
        ({"phase": "Pending", "containerStatuses": [{"state": None}]}, "Pending"),
        ({}, "it has no status"),
    ],
)
def test_pod_that_does_not_run_in_time_has_its_reason(
    nodes: KubectlStandin, status: dict[str, Any], reason: str
) -> None:
    pod = nodes.serve_debug_pod("b")
    nodes.respond("get", "pod", pod, output={"status": status})
    made = debug_pods.DebugPods(Cluster([nodes.command], timeout_seconds=0.0))
    with pytest.raises(KubectlError) as failed:
        made.ensure("b")
    assert str(failed.value) == f"its debug pod {pod} does not run: {reason}"
    made.close()
    made.close()
    ((arguments, _),) = nodes.calls("delete")
    assert arguments == [
        *("delete", "pod", pod, "--namespace=podgate"),
        *("--ignore-not-found", "--wait=false", "--grace-period=1"),
    ]


def test_node_has_one_pod_for_all_commands(nodes: KubectlStandin) -> None:
    pod = nodes.serve_debug_pod("b")
    made = debug_pods.DebugPods(Cluster([nodes.command]))
    assert [made.ensure("b"), made.ensure("b")] == [pod, pod]
    assert len(nodes.calls("create", "--namespace=podgate", "--filename=-")) == 1
    assert len(nodes.calls("get", "daemonset")) == 1


def test_pod_that_is_still_starting_is_awaited(
    nodes: KubectlStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = nodes.serve_debug_pod("b", state="waiting")
    nodes.respond("exec", pod, "doctor", output={"findings": []})
    monkeypatch.setattr(
        "agent.operate.kubectl.debug_pods.time.sleep", lambda _: nodes.serve_debug_pod("b")
    )
    assert run(nodes, "--debug-pods", "doctor") == 0

"""`kubectl podgate` about all nodes of a real cluster, which has one, with a real kubectl."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agent import VERSION
from tests import polling
from tests.cluster import one_node
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.plugin import Plugin
from tests.cluster.workloads import ISOLATION_READY, PORT, PROBED, WEB, Workloads
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel
_GATE = "example.com/checked"
_CONNECT = "import socket, sys; socket.socket().connect_ex((sys.argv[1], int(sys.argv[2])))"


@pytest.fixture
def web(namespaces: Namespaces) -> tuple[Workloads, Json]:
    """An enforced namespace with a pod that is Ready."""
    users: Workloads = namespaces("enforce")
    users.run("web", PROBED, gates=(ISOLATION_READY,))
    users.until_isolated("web")
    return users, users.pod("web")


@pytest.fixture
def backup() -> Iterator[Cgroup]:
    """A service of the node."""
    with cgroups.cgroup("podgate-test-fleet.service") as group:
        yield group


def connect(source: Cgroup, pod: Json) -> None:
    """To a port that the pod does not declare."""
    command = [sys.executable, "-c", _CONNECT, pod["status"]["podIP"], str(PORT + 1)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        source.run(command)


def decoded(plugin: Plugin, *arguments: str) -> tuple[int, Any]:
    status, output = plugin.run(*arguments, "-o", "json")
    return status, json.loads(output)


def test_status_has_the_node_with_its_pods_in_force(
    plugin: Plugin, web: tuple[Workloads, Json]
) -> None:
    def settled() -> Json | None:
        """Pods of previous tests, which are being deleted, may have no sandbox any more."""
        status, found = decoded(plugin, "status")
        assert status == 0
        return None if found["podsNotAsDesired"] else dict(found)

    found = polling.wait_until("all pods are as desired", settled)
    assert found is not None
    (node,) = found["nodes"]
    assert (node["node"], node["version"]) == (one_node.NAME, VERSION)
    assert node["isReady"]
    assert node["kubelet"].endswith("/kubelet.service")
    assert node["desired"] == node["inForce"]
    assert node["inForce"]["enforce"] >= 1
    status, output = plugin.run("status")
    assert status == 0
    assert output.splitlines()[1].split()[:4] == [one_node.NAME, VERSION, "yes", "yes"]


def test_drop_is_listed_and_explained(
    plugin: Plugin, backup: Cgroup, web: tuple[Workloads, Json]
) -> None:
    users, pod = web
    name = f"{users.namespace}/web"

    def listed() -> list[Json]:
        connect(backup, pod)
        status, found = decoded(plugin, "drops", "-n", users.namespace, "--pod", "web")
        assert status == 0
        return [one for one in found["sources"] if one["cgroup"] == backup.path]

    (source,) = polling.wait_until("the drop is listed", listed)
    assert (source["node"], source["port"], source["mode"]) == (
        one_node.NAME,
        PORT + 1,
        "enforce",
    )
    command = ("explain", "--from", f"cgroup:{backup.path}", "--to", name)
    status, found = decoded(plugin, *command, "--port", str(PORT + 1))
    assert (status, found["verdict"]) == (1, "drop")
    assert found["target"]["pod"] == "web"


def test_drops_are_followed_and_nothing_of_it_stays_on_the_node(
    plugin: Plugin, backup: Cgroup, web: tuple[Workloads, Json], tmp_path: pathlib.Path
) -> None:
    users, pod = web
    output = tmp_path / "lines"
    # Of a shell's background job, SIGINT is ignored by all that it starts.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "agent.operate.kubectl.main"]
    command += [*plugin.options, "drops", "--follow"]
    with output.open("wb") as file:
        following = subprocess.Popen(
            [*command, "-n", users.namespace], stdout=file, stderr=file, start_new_session=True
        )
    try:

        def is_shown() -> bool:
            connect(backup, pod)
            return f"{users.namespace}/web tcp {PORT + 1}" in output.read_text(encoding="utf-8")

        polling.wait_until("the drop is shown", is_shown)
        assert following_in_agents()
        following.send_signal(signal.SIGINT)
        assert following.wait(polling.PATIENCE_SECONDS) == 130
    finally:
        following.kill()
        following.wait(polling.PATIENCE_SECONDS)
    polling.wait_until("no process of it is left", lambda: not following_in_agents())


def following_in_agents() -> list[int]:
    """Processes of `podgate drops --follow` in this machine."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            is_of_kubectl = b"exec" in words or b"agent.operate.kubectl.main" in words
            if {b"drops", b"--follow"} <= set(words) and not is_of_kubectl:
                found.append(int(process.name))
    return found


def test_false_readiness_gate_is_why_a_pod_is_not_ready(
    node: OneNode, plugin: Plugin, web: tuple[Workloads, Json]
) -> None:
    users, _ = web
    users.run("gated", WEB, gates=(_GATE, ISOLATION_READY))
    users.until("gated", ISOLATION_READY, "True", "Enforced")
    users.until("gated", "ContainersReady")
    condition = {"type": _GATE, "status": "False", "reason": "Unchecked", "message": "Not yet."}
    pod = users.pod("gated")
    others = [one for one in pod["status"]["conditions"] if one["type"] != _GATE]
    node.api.patch(
        f"{users.pods_path}/gated/status", {"status": {"conditions": [*others, condition]}}
    )
    status, found = decoded(plugin, "why-not-ready", "gated", "-n", users.namespace)
    assert (status, found["isReady"]) == (1, False)
    unmet = [one["text"] for one in found["findings"] if not one["isMet"]]
    assert unmet == [f"{_GATE} is False, Unchecked: Not yet."]
    assert found["nextCommand"] == f"kubectl describe pod gated -n {users.namespace}"
    status, output = plugin.run("why-not-ready", f"{users.namespace}/web")
    assert (status, output.splitlines()[0]) == (0, f"Pod {users.namespace}/web is Ready.")


def test_node_whose_agent_is_stopped_is_named_with_the_reason(
    plugin: Plugin, podgate: Deployment, web: tuple[Workloads, Json]
) -> None:
    users, _ = web
    report = podgate.report()
    assert report is not None
    os.kill(report.pid, signal.SIGSTOP)
    try:
        status, found = decoded(plugin, "status")
        (node,) = found["nodes"]
        assert status == 3
        assert "The agent hangs" in node["problem"]
        assert "gates are in force" in node["problem"]
        _, found = decoded(plugin, "why-not-ready", f"{users.namespace}/web")
        texts = [one["text"] for one in found["findings"] if not one["isMet"]]
        assert any("The agent hangs" in text for text in texts), found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(report.pid, signal.SIGCONT)
    polling.wait_until("the agent responds", podgate.report, seconds=180)


def test_doctor_finds_the_cluster_in_order(plugin: Plugin, node: OneNode) -> None:
    _, found = decoded(plugin, "doctor")
    assert found["problems"] == {}
    for check in ("api-server", "rights", "definitions", "clock", "runtime", "dns-rule"):
        assert check in found["passed"], found
    severities = {one["finding"]["severity"] for one in found["findings"]}
    assert severities.isdisjoint(("open", "broken")), found

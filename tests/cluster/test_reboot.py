"""A reboot: tasks, pins and what is in /run are gone when the kubelet starts."""

import shutil
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import cni, watching
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    PORT,
    PROBED,
    PROBES_PASSING,
    condition,
    is_reachable,
)
from tests.image.node import BPFFS, RUN_DIRECTORY
from tests.runtime.host_process import HostProcess

pytestmark = pytest.mark.kernel
MODES = pytest.mark.parametrize("mode", ["enforce", "strict"])
_CONNECT_SECONDS = 0.05


@pytest.fixture
def strict_start(node: OneNode, podgate: Deployment) -> Iterator[None]:
    """podgate-cni is installed, and after a reboot pods wait for the agent."""
    with cni.installed(node, podgate, arguments=["--cni-strict-start"]):
        yield


def _reboot(node: OneNode) -> None:
    node.kubelet.stop()
    node.lose_containers()
    shutil.rmtree(BPFFS / "podgate")
    for path in RUN_DIRECTORY.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.kubelet.start()
    node.kubelet.wait_until_ready()


@MODES
def test_with_strict_start_no_pod_is_ever_open(
    node: OneNode, podgate: Deployment, strict_start: None, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    names = [f"web{number}" for number in range(4)]
    for name in names:
        users.run(name, PROBED, gates=(ISOLATION_READY, PROBES_PASSING))
    old = {pod["status"]["podIP"] for pod in users.until_isolated(*names)}
    addresses = node.runtime.directory / "ipam" / "pods"
    with HostProcess(addresses, PORT, _CONNECT_SECONDS) as attempts:
        _reboot(node)
        polling.wait_until(
            "the pods have new addresses",
            lambda: not old & {pod["status"].get("podIP") for pod in users.pods()},
        )
        pods = users.until_isolated(*names)
        podgate.wait_until_ready()
    assert {pod["status"]["podIP"] for pod in pods} <= attempts.tried
    assert attempts.reached == set()
    assert not any(is_reachable(pod) for pod in pods)


def test_deleted_pods_of_the_plugin_lose_no_gate_with_an_error(
    podgate: Deployment, strict_start: None, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    names = [f"web{number}" for number in range(8)]
    for name in names:
        users.run(name, PROBED, gates=(ISOLATION_READY, PROBES_PASSING))
    users.until_isolated(*names)
    reasons = set()

    def see(event: Json) -> None:
        found = condition(event["object"], ISOLATION_READY)
        if found.get("status") == "False":
            reasons.add(found["reason"])

    with watching.followed(users, see):
        for name in names:
            users.delete(name)
        users.until_gone(*names)
    # A pod whose interface is gone may exist for a moment longer.
    assert reasons <= {"NoInterface", "NetnsNotFound"}
    assert "gate_lost" not in podgate.log()


class Followed:
    """Each pod's condition as clients of the API server see it after the reboot, and whether the
    pod is closed then."""

    def __init__(self, before: list[Json]) -> None:
        self.open: list[str] = []
        """Pods that the condition called isolated in their new sandbox, and were not."""
        self.unready: list[str] = []
        """Of pods whose new containers ran and whose condition was False."""
        self._old = {_sandbox(pod) for pod in before}
        self._seen: set[str] = set()

    def see(self, event: Json) -> None:
        pod = event["object"]
        found = condition(pod, ISOLATION_READY)
        is_running = condition(pod, "ContainersReady").get("status") == "True"
        sandbox = _sandbox(pod)
        if found["status"] == "False" and is_running:
            self.unready.append(f"{pod['metadata']['name']}: {found}")
        if found["status"] == "True" and sandbox not in self._old | self._seen:
            self._seen.add(sandbox)
            if is_running and is_reachable(pod):
                self.open.append(pod["metadata"]["name"])


def _sandbox(pod: Json) -> str:
    """Which one the condition is about."""
    return str(condition(pod, ISOLATION_READY)["message"].rpartition("(sandbox ")[2])


@MODES
def test_without_strict_start_conditions_are_true_only_of_pods_that_are_gated_again(
    podgate: Deployment, node: OneNode, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    names = [f"web{number}" for number in range(8)]
    for name in names:
        users.run(name, PROBED, gates=(ISOLATION_READY, PROBES_PASSING))
    before = users.until_isolated(*names)
    old = {_sandbox(pod) for pod in before}
    followed = Followed(before)
    with watching.followed(users, followed.see):
        _reboot(node)
        polling.wait_until(
            "the conditions are about new sandboxes",
            lambda: not old & {_sandbox(pod) for pod in users.pods()},
        )
        pods = users.until_isolated(*names)
        podgate.wait_until_ready()
    assert followed.open == []
    assert followed.unready == []
    assert not any(is_reachable(pod) for pod in pods)

"""Many pods at once by a runtime with NRI: each gate is in force before the first instruction.

Runs where BIN has such a runtime (`make test-nri` names its programs).
"""

import shutil
import time

import pytest
from prometheus_client import parser

from tests import polling
from tests.cluster import watching
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    PORT,
    PROBES_PASSING,
    WEB,
    condition,
)
from tests.image.node import BPFFS, RUN_DIRECTORY
from tests.runtime.host_process import HostProcess

pytestmark = pytest.mark.kernel

BOTH = (ISOLATION_READY, PROBES_PASSING)
_PODS = 60
_REBOOTED = 12
_SECONDS = 600
_CONNECT_SECONDS = 0.02
_SLOW_PROBE = {**HTTP_PROBE, "timeoutSeconds": 30}
# Without podgate's NRI plugin, no container.
_REQUIRED = {"required-plugins.noderesource.dev": '["podgate"]'}


def web(neighbour: str) -> Json:
    """A container whose first act is a connection to the pod next door; it serves if that is
    answered, and else fails."""
    request = "printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n'"
    act = f'answer=$({request} | /bin/nc -w 20 {neighbour} {PORT}) && [ -n "$answer" ]'
    return {
        **WEB,
        "command": ["/bin/sh", "-c", f"{act} && exec /bin/httpd -f -p {PORT} -h /www"],
        "startupProbe": {**HTTP_PROBE, "failureThreshold": 900},
        "readinessProbe": _SLOW_PROBE,
    }


def host_process(node: OneNode) -> HostProcess:
    return HostProcess(node.runtime.directory / "ipam" / "pods", PORT, _CONNECT_SECONDS)


def started(podgate: Deployment) -> dict[str, float]:
    """Pods that have started by NRI, by result."""
    return {
        sample.labels["result"]: sample.value
        for family in parser.text_string_to_metric_families(podgate.metrics())
        for sample in family.samples
        if sample.name == "podgate_nri_pods_total"
    }


def are_ready(pods: list[Json]) -> bool:
    return all(condition(pod, "Ready").get("status") == "True" for pod in pods)


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_sixty_pods_at_once_have_their_gate_before_their_first_instruction(
    node: OneNode, podgate: Deployment, namespaces: Namespaces, mode: str
) -> None:
    podgate.until("NRI", lambda report: report.components.get("nri"))
    users = namespaces(mode)
    with host_process(node) as host:
        users.run("neighbour", gates=BOTH)
        (neighbour,) = users.until_ready("neighbour")
        before = started(podgate)
        began = time.monotonic()
        for number in range(_PODS):
            users.run(f"web{number}", web(neighbour["status"]["podIP"]), gates=BOTH)
        polling.wait_until("all are Ready", lambda: are_ready(users.pods()), seconds=_SECONDS)
        seconds = time.monotonic() - began
    after = started(podgate)
    results = {result: after[result] - before[result] for result in after}
    print(f"{_PODS} pods, {mode}: {seconds:.1f} s, {host.attempts} attempts, {results}")  # noqa: T201
    assert host.reached.isdisjoint(pod["status"]["podIP"] for pod in users.pods())
    assert users.restarts() == {}
    # On a node that is overloaded the answer may be late, or the runtime may not have called: what
    # counts is that no container started before its pod's gate.
    assert results["gated"] > 0
    early = [one for one in podgate.log().splitlines() if "containers_started_before_gate" in one]
    assert not [line for line in early if f'"{users.namespace}/' in line]


class Followed:
    """Pods that became Ready after a reboot by a condition from before it."""

    def __init__(self, before: list[Json]) -> None:
        self.wrong: list[str] = []
        self._old = {sandbox(pod) for pod in before}
        self._was_unready: set[str] = set()

    def see(self, event: Json) -> None:
        pod = event["object"]
        name = pod["metadata"]["name"]
        if condition(pod, "Ready").get("status") != "True":
            self._was_unready.add(name)
        elif name in self._was_unready and sandbox(pod) in self._old:
            self.wrong.append(f"{name}: {condition(pod, ISOLATION_READY)}")


def sandbox(pod: Json) -> str:
    """Which one the condition is about."""
    return str(condition(pod, ISOLATION_READY)["message"].rpartition("(sandbox ")[2])


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_pods_that_require_podgate_are_closed_and_not_ready_until_it_runs_after_a_reboot(
    node: OneNode, podgate: Deployment, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    names = [f"web{number}" for number in range(_REBOOTED)]
    patient = {**WEB, "startupProbe": {**HTTP_PROBE, "failureThreshold": 900}}
    for name in names:
        users.run(name, patient, gates=BOTH, annotations=_REQUIRED)
    before = users.until_isolated(*names)
    followed = Followed(before)
    with host_process(node) as host, watching.followed(users, followed.see):
        node.kubelet.stop()
        node.lose_containers()
        shutil.rmtree(BPFFS / "podgate")
        for path in RUN_DIRECTORY.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        node.kubelet.start()
        node.kubelet.wait_until_ready()
        old = {sandbox(pod) for pod in before}
        polling.wait_until(
            "the conditions are about new sandboxes",
            lambda: not old & {sandbox(pod) for pod in users.pods()},
        )
        users.until_isolated(*names)
        podgate.wait_until_ready()
    assert host.reached == set()
    assert followed.wrong == []

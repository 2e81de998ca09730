"""podgate beside a real kubelet without an API server: its static pods."""

import json
import pathlib
import shutil
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.api.podinfo import sockets
from agent.kubelet import kubelet_pb2, pods_api
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.logs import Event
from agent.pods.conditions import TRUE
from tests import polling
from tests.chart.outputs import STANDALONE
from tests.cluster import one_node, podinfo
from tests.cluster.conftest import binaries
from tests.cluster.kubelet import FEATURE_GATES, Kubelet
from tests.cluster.workloads import HTTP_PROBE, PORT, WEB
from tests.image.node import BPFFS, RUN_DIRECTORY
from tests.runtime.containerd import Containerd

pytestmark = pytest.mark.kernel

_REASONS = {"audit": "Audit", "enforce": "Enforced", "strict": "Strict"}
_BY_AGENT = {"podgate.io/probes": "agent"}


class Standalone:
    """A node: its kubelet and runtime, and podgate as its operator starts it."""

    def __init__(self, runtime: Containerd, kubelet: Kubelet, agent: AgentProcess) -> None:
        self.runtime = runtime
        self.kubelet = kubelet
        self.agent = agent
        agent.pods_from = ("--standalone", "--cri-socket", str(runtime.socket))

    def write(self, name: str, *, mode: str | None = None, **container: Any) -> None:
        """A static pod with a server."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "edge",
                "labels": {labels.MODE_LABEL: mode} if mode else {},
                "annotations": _BY_AGENT,
            },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{**WEB, "ports": [{"containerPort": PORT}], **container}],
            },
        }
        unfinished = self.kubelet.manifests.parent / f"{name}.json"
        unfinished.write_text(json.dumps(pod))
        unfinished.rename(self.kubelet.manifests / unfinished.name)

    def remove(self, name: str) -> None:
        (self.kubelet.manifests / f"{name}.json").unlink()

    def until(self, name: str, reason: str) -> AgentReport:
        """Wait until the pod's condition has this reason."""

        def holds(report: AgentReport) -> bool:
            found = condition_of(report, _static(name), labels.ISOLATION_READY)
            return found is not None and found.reason == reason

        return self.agent.wait_for(f"{name} {reason}", holds)

    def address(self, report: AgentReport, name: str) -> str:
        found = pod_of(report, _static(name))
        assert found is not None
        return found.addresses[0]


def _static(name: str) -> str:
    """As the kubelet names a static pod (pkg/kubelet/config/common.go: generatePodName)."""
    return f"{name}-{one_node.NAME}"


def _is_reachable(address: str) -> bool:
    try:
        socket.create_connection((address, PORT), 1).close()
    except (PermissionError, TimeoutError):
        return False
    return True


@pytest.fixture(scope="module")
def machine(isolated: None) -> Iterator[tuple[Containerd, Kubelet]]:
    with one_node.standalone(binaries()) as made:
        yield made


@pytest.fixture
def node(machine: tuple[Containerd, Kubelet], tmp_path: pathlib.Path) -> Iterator[Standalone]:
    """Without static pods and agent, as the test before it found it."""
    runtime, kubelet = machine
    made = Standalone(runtime, kubelet, AgentProcess(tmp_path))
    try:
        yield made
    finally:
        for file in kubelet.manifests.iterdir():
            file.unlink()
        made.agent.stop(signal.SIGTERM)
        polling.wait_until("its pods are gone", lambda: not _sandboxes(runtime))
        done = made.agent.cleanup()
        assert done.returncode == 0, done.stderr


def _sandboxes(runtime: Containerd) -> list[pathlib.Path]:
    return list((runtime.directory / "state").glob("io.containerd.runtime.v2.task/k8s.io/*"))


def _is_ready_by_the_kubelet(uid: str) -> bool:
    with podinfo.pods_api(pods_api.SOCKET) as get:
        pod = kubelet_pb2.Pod.FromString(get(uid))
    return any(one.type == "Ready" and one.status == TRUE for one in pod.status.conditions)


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_static_pod_is_closed_to_the_node_and_its_kubelet_and_podgate_probe_it(
    node: Standalone, mode: str
) -> None:
    node.write("web", mode=mode, readinessProbe=HTTP_PROBE, livenessProbe=HTTP_PROBE)
    node.agent.start()
    report = node.until("web", _REASONS[mode])
    assert not _is_reachable(node.address(report, "web"))
    found = pod_of(report, _static("web"))
    assert found is not None
    polling.wait_until("ready by the kubelet's probes", lambda: _is_ready_by_the_kubelet(found.uid))
    node.agent.wait_for(
        "passing by podgate's own",
        lambda report: (
            (condition := condition_of(report, _static("web"), labels.PROBES_PASSING)) is not None
            and condition.status == TRUE
        ),
    )
    # Whole pods, from the same socket as in a cluster.
    with (
        podinfo.pods_api(sockets.pods_api(node.agent.run_directory)) as own,
        podinfo.pods_api(pods_api.SOCKET) as kubelet,
    ):
        polling.wait_until(
            "both have the same pod",
            lambda: (
                podinfo.without_conditions(own(found.uid))
                == podinfo.without_conditions(kubelet(found.uid))
            ),
        )


def test_label_in_the_manifest_decides_in_both_directions(node: Standalone) -> None:
    node.write("web", mode="off")
    node.agent.start("--mode", "enforce")
    report = node.until("web", "Off")
    assert _is_reachable(node.address(report, "web"))
    # The kubelet makes another pod of a changed file.
    node.write("web")
    report = node.until("web", "Enforced")
    assert not _is_reachable(node.address(report, "web"))


def test_pods_stay_closed_while_agent_and_kubelet_start_again_in_any_order(
    node: Standalone,
) -> None:
    node.write("web", mode="enforce", livenessProbe=HTTP_PROBE)
    node.agent.start()
    report = node.until("web", "Enforced")
    address = node.address(report, "web")
    node.agent.event(Event.AGENT_STARTED)
    node.kubelet.stop()
    node.agent.stop(signal.SIGTERM)
    assert not _is_reachable(address)
    node.agent.start()
    # From what the agent before it saved: its mode, and what the kubelet may reach.
    report = node.until("web", "Enforced")
    found = pod_of(report, _static("web"))
    assert found is not None
    assert found.addresses == [address]
    assert not _is_reachable(address)
    report = node.agent.wait_for("the finding", lambda report: _has(report, "kubelet-unreachable"))
    node.kubelet.start()
    report = node.agent.wait_for(
        "no finding", lambda report: not _has(report, "kubelet-unreachable")
    )
    assert condition_of(report, _static("web"), labels.ISOLATION_READY) is not None
    assert not _is_reachable(address)


def _has(report: AgentReport, kind: str) -> bool:
    return any(finding.kind == kind for finding in report.findings)


def test_pods_of_a_reboot_are_closed_before_the_kubelet_probes_them(node: Standalone) -> None:
    node.write("web", mode="strict", readinessProbe=HTTP_PROBE)
    node.agent.start()
    before = pod_of(node.until("web", "Strict"), _static("web"))
    node.agent.stop(signal.SIGKILL)
    node.kubelet.stop()
    cgroup = node.kubelet.daemon.cgroup.parent / "kubepods"
    (cgroup / "cgroup.kill").write_text("1")
    node.kubelet.start()
    node.agent.start()
    after = pod_of(node.until("web", "Strict"), _static("web"))
    assert before is not None
    assert after is not None
    assert after.uid == before.uid
    assert not _is_reachable(after.addresses[0])


def test_without_the_pods_api_pods_have_the_nodes_mode_and_a_finding_has_the_reason(
    node: Standalone,
) -> None:
    node.kubelet.restart_with(featureGates=FEATURE_GATES | {"PodsAPI": False})
    try:
        node.write("web", readinessProbe=HTTP_PROBE)
        node.agent.start("--mode", "enforce")
        report = node.agent.wait_for(
            "the finding", lambda report: _has(report, "kubelet-unreachable")
        )
        report = node.until("web", "Enforced")
        assert not _is_reachable(node.address(report, "web"))
        (finding,) = [one for one in report.findings if one.kind == "pods-not-synced"]
        assert "pods API" in finding.sentence
    finally:
        node.kubelet.restart_with(featureGates=FEATURE_GATES)


def test_podgate_itself_is_a_static_pod(node: Standalone, image: pathlib.Path) -> None:
    node.runtime.import_archive(image)
    node.write("web", mode="strict", readinessProbe=HTTP_PROBE)
    shutil.copy(STANDALONE, node.kubelet.manifests)
    node.agent.run_directory, node.agent.bpffs = RUN_DIRECTORY, BPFFS
    report = node.until("web", "Strict")
    assert not _is_reachable(node.address(report, "web"))
    found = pod_of(report, _static("web"))
    assert found is not None
    polling.wait_until("ready by the kubelet's probes", lambda: _is_ready_by_the_kubelet(found.uid))
    own = pod_of(report, _static("podgate"))
    assert own is not None
    polling.wait_until("podgate is ready", lambda: _is_ready_by_the_kubelet(own.uid))


def test_removed_static_pod_leaves_nothing(node: Standalone) -> None:
    node.write("web", mode="enforce")
    node.agent.start()
    node.until("web", "Enforced")
    node.remove("web")
    node.agent.wait_for("no pods", lambda report: not report.pods)

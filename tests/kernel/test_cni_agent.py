"""podgate-cni and the agent, one after the other and concurrently, while a client dials."""

import asyncio
import pathlib
import signal
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.default_deny import table as default_deny_table
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab, LabPod
from bpf.gates import Attachment
from tests.kernel import dialling, offers
from tests.kernel.cniruntime import FIRST, Network, pod_in, sandbox
from tests.kernel.dialling import PORT

pytestmark = pytest.mark.kernel

ATTACHMENTS = pytest.mark.parametrize("attachment", list(Attachment))
LISTENING = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}


@pytest.fixture
def network(
    lab: Lab, operator: AgentProcess, plugin: pathlib.Path, tmp_path: pathlib.Path
) -> Iterator[Network]:
    """Of a node whose agent is the operator's."""
    where = {"bpffs": str(operator.bpffs), "runDirectory": str(operator.run_directory)}
    yield Network(tmp_path, "ptp", plugin, **where)
    operator.stop(signal.SIGKILL)
    asyncio.run(default_deny_table.remove())


@pytest.fixture
def path(lab: Lab) -> Iterator[str]:
    with sandbox("web") as made:
        yield made


def isolated_as(reason: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = condition_of(report, "web", labels.ISOLATION_READY)
        return condition is not None and condition.reason == reason

    return holds


def reaches(pod: LabPod) -> bool:
    return attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=True) == "connects"


def to_be(path: str) -> LabPod:
    """A pod with an empty namespace, for a manifest."""
    from probes.netns import Netns

    return LabPod("web", Netns.open(path), "", 0, (), is_bridged=False)


@ATTACHMENTS
def test_an_agent_that_starts_later_takes_the_gate_over_without_a_gap(
    operator: AgentProcess, network: Network, path: str, attachment: Attachment
) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()
    options = ("--mode", "enforce", "--attach", attachment.value)
    operator.start(*options)
    operator.wait_for("pins", lambda report: report.is_synced)
    operator.stop(signal.SIGKILL)
    asyncio.run(default_deny_table.remove())  # which would hide a gap of the gate's
    with dialling.dialling(*FIRST.values()) as dialler:
        network.add("web", path)
        assert not network.stderr
        pod = pod_in(path, "web")
        with pod.listen(PORT):
            dialler.go_on()
            operator.write_manifest(pod, mode=None, container=LISTENING)
            operator.start(*options)
            operator.wait_for("the gate", isolated_as("Enforced"))
            dialler.go_on()
    assert dialler.connected == 0
    network.delete("web", path)


def test_an_agent_that_runs_finds_the_pod_closed_and_opens_nothing(
    operator: AgentProcess, network: Network, path: str
) -> None:
    operator.write_manifest(to_be(path), mode=None, container=LISTENING)
    operator.start("--mode", "enforce")
    operator.wait_for("the agent", lambda report: report.is_synced)
    with dialling.dialling(*FIRST.values()) as dialler:
        network.add("web", path)
        assert not network.stderr
        with pod_in(path, "web").listen(PORT):
            operator.wait_for("the gate", isolated_as("Enforced"))
            dialler.go_on()
            assert dialler.connected == 0
            network.delete("web", path)


def test_gate_of_the_plugin_is_removed_from_a_pod_in_off(
    operator: AgentProcess, network: Network, path: str
) -> None:
    operator.write_manifest(to_be(path), mode="off", container=LISTENING)
    operator.start("--mode", "enforce")
    operator.wait_for("the agent", isolated_as("Off"))
    network.add("web", path)
    pod = pod_in(path, "web")
    with pod.listen(PORT):
        operator.wait_for("open", lambda _: reaches(pod))
    network.delete("web", path)


def test_pod_without_a_manifest_keeps_its_gate(
    operator: AgentProcess, network: Network, path: str
) -> None:
    """An agent that has just started removes only what a previous agent left."""
    waiting = {
        "kind": "Pod",
        "metadata": {"name": "late", "annotations": {labels.NETNS_ANNOTATION: "/nowhere"}},
        "spec": {"containers": [{"name": "app"}]},
    }
    operator.write_file("late.yaml", str(waiting))
    operator.start("--mode", "enforce")
    operator.wait_for("the agent", lambda report: report.is_synced and bool(report.pods))
    asyncio.run(default_deny_table.remove())
    network.add("web", path)
    (operator.manifests / "late.yaml").unlink()
    operator.wait_for("the other pod gone", lambda report: not report.pods)
    pod = pod_in(path, "web")
    with dialling.dialling(*FIRST.values()) as dialler, pod.listen(PORT):
        dialler.go_on()
        operator.write_manifest(pod, mode=None, container=LISTENING)
        operator.wait_for("the gate", isolated_as("Enforced"))
        dialler.go_on()
        assert dialler.connected == 0
    network.delete("web", path)


def test_after_cleanup_no_pod_waits_for_gates(
    operator: AgentProcess,
    network: Network,
    plugin: pathlib.Path,
    tmp_path: pathlib.Path,
    path: str,
) -> None:
    operator.start("--mode", "enforce")
    operator.wait_for("pins", lambda report: report.is_synced)
    operator.stop(signal.SIGTERM)
    assert operator.cleanup().returncode == 0
    where = {"bpffs": str(operator.bpffs), "runDirectory": str(operator.run_directory)}
    strict = Network(tmp_path, "ptp", plugin, strictStart=True, **where)
    strict.add("web", path)
    pod = pod_in(path, "web")
    with pod.listen(PORT):
        assert attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=False) == "connects"
    strict.delete("web", path)

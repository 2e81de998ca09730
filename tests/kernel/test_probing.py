"""Probe results of a running agent: after a restart, in `status`, and in `probe --pod`."""

import json
import pathlib
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport, ProbeStatus
from agent.lab.agent_process import AgentProcess, Launch, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import TRUE
from bpf import pins
from probes.spec.probespec import ANNOTATION

pytestmark = pytest.mark.kernel

PORT = 8080
ONCE_AN_HOUR = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 3600}}


@pytest.fixture
def operator(
    launch: Launch, tmp_path: pathlib.Path, installed_pins: pins.Pins
) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    yield made
    made.stop(signal.SIGKILL)


@pytest.fixture
def web(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


def passes(report: AgentReport) -> bool:
    condition = condition_of(report, "web", labels.PROBES_PASSING)
    return condition is not None and condition.status == TRUE


def probe_of(report: AgentReport) -> ProbeStatus | None:
    pod = pod_of(report, "web")
    return next(iter(pod.probes), None) if pod else None


def podgate(operator: AgentProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return operator.run(*words, "--run-directory", str(operator.run_directory))


def has_failed_once(report: AgentReport) -> bool:
    found = probe_of(report)
    return found is not None and found.failures == 1


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_does_not_make_a_pod_unready(
    operator: AgentProcess, web: LabPod, end: signal.Signals
) -> None:
    operator.write_manifest(web, mode="off", container=ONCE_AN_HOUR)
    saved = operator.run_directory / "state" / "probes.json"
    with web.listen(PORT):
        operator.start()
        operator.wait_for("probes to pass", passes)
        operator.wait_for("the file", lambda _: saved.exists() and '"success"' in saved.read_text())
        operator.stop(end)
    lines = len(list(operator.log_lines()))
    operator.start()
    # The listener is closed; one failure of three changes nothing, as before the restart.
    report = operator.wait_for("the first probe", has_failed_once)
    assert passes(report)
    later = list(operator.log_lines())[lines:]
    statuses = {line["status"] for line in later if line.get("type") == labels.PROBES_PASSING}
    assert statuses == {TRUE}
    assert saved.parent.stat().st_mode & 0o777 == 0o700
    assert saved.stat().st_mode & 0o777 == 0o600


def with_probe_spec(pod: LabPod, port: int) -> str:
    spec = {
        "apiVersion": "podgate.io/v2",
        "containers": [{"name": "app", "readiness": {"tcp": {"port": port}}}],
    }
    annotations = {labels.NETNS_ANNOTATION: pod.netns.path, ANNOTATION: json.dumps(spec)}
    manifest = {
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": "demo", "annotations": annotations},
        "spec": {"containers": [{"name": "app"}]},
    }
    return json.dumps(manifest)


def has_message(words: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = condition_of(report, "web", labels.PROBES_PASSING)
        return condition is not None and words in condition.message

    return holds


def handler_of(report: AgentReport) -> str:
    found = probe_of(report)
    return found.handler if found else ""


def test_probe_spec_changes_in_place(operator: AgentProcess, web: LabPod) -> None:
    operator.write_file("web.yaml", with_probe_spec(web, PORT))
    with web.listen(PORT), web.listen(PORT + 1):
        operator.start()
        operator.wait_for("probes to pass", passes)
        lines = len(list(operator.log_lines()))
        operator.write_file("web.yaml", with_probe_spec(web, PORT + 1))
        is_changed = f"tcp :{PORT + 1}"
        operator.wait_for("the other port", lambda report: handler_of(report) == is_changed)
        operator.event(Event.PROBE_CHANGED, probe="readiness", action="updated")
        operator.write_file("web.yaml", with_probe_spec(web, 0))
        for _ in range(2):
            report = operator.wait_for("the warning", has_message("is invalid; the last valid one"))
            assert handler_of(report) == is_changed
            assert passes(report)
            operator.stop(signal.SIGTERM)
            operator.start()
        operator.write_file("web.yaml", with_probe_spec(web, PORT))
        report = operator.wait_for("no warning", lambda report: not has_message("invalid")(report))
        assert handler_of(report) == f"tcp :{PORT}"
    later = list(operator.log_lines())[lines:]
    statuses = {line["status"] for line in later if line.get("type") == labels.PROBES_PASSING}
    assert statuses <= {TRUE}


def test_invalid_probe_spec_can_be_corrected(operator: AgentProcess, web: LabPod) -> None:
    operator.write_file("web.yaml", with_probe_spec(web, 0))
    with web.listen(PORT):
        operator.start()
        operator.wait_for("the problem", has_message(ANNOTATION))
        operator.write_file("web.yaml", with_probe_spec(web, PORT))
        operator.wait_for("probes to pass", passes)


def test_status_shows_the_address_family_that_answered(operator: AgentProcess, web: LabPod) -> None:
    operator.write_manifest(web, mode="off", container=ONCE_AN_HOUR)
    with web.listen(PORT):
        operator.start()
        found = probe_of(operator.wait_for("probes to pass", passes))
    assert found is not None
    assert found.families == ["IPv4"]
    assert "IPv4" in podgate(operator, "probes", "--output", "wide").stdout
    shown = json.loads(podgate(operator, "status", "--output", "json").stdout)
    assert shown["pods"][0]["probes"][0]["families"] == ["IPv4"]


def test_a_pod_of_the_agent_is_probed_by_name(operator: AgentProcess, web: LabPod) -> None:
    operator.write_manifest(web, mode="off", container={})
    with web.listen(PORT):
        operator.start()
        operator.wait_for(
            "the pod", lambda report: bool((p := pod_of(report, "web")) and p.addresses)
        )
        for name in ("web", "demo/web"):
            done = podgate(operator, "probe", "--pod", name, "tcp", str(PORT))
            assert done.returncode == 0, done.stderr
            assert "success over IPv4" in done.stdout
        done = podgate(operator, "probe", "--pod", "shop", "tcp", str(PORT))
    assert done.returncode == 1
    assert done.stderr == ("podgate: the agent has no pod shop; 'podgate status' lists its pods.\n")

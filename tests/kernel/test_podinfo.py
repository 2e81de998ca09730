"""PodInfo API of a whole agent, without a cluster."""

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from agent import labels
from agent.client.podinfo import PodInfoClient
from agent.lab.agent_process import AgentProcess, pod_of
from agent.lab.lab import Lab
from tests.kernel.test_agent import LISTENING, isolated_as

pytestmark = pytest.mark.kernel


def podgate_pods(operator: AgentProcess, *arguments: str) -> Any:
    """Output of `podgate pods`."""
    waiting = PodInfoClient(f"unix://{operator.run_directory}/podinfo/podinfo.sock")
    # A client that connects before every pod has been read gets an error that states it.
    assert waiting.next() is not None
    waiting.close()
    where = ("--run-directory", str(operator.run_directory))
    found = operator.run("pods", "--output", "json", *where, *arguments)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_podgate_pods_lists_pods_of_manifests_also_after_a_restart(
    operator: AgentProcess, lab: Lab
) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.write_file("broken.yaml", "kind: Nothing")
    operator.start()
    report = operator.wait_for("the gate", isolated_as("web", "Enforced"))
    state = podgate_pods(operator)
    (one,) = state["pods"]
    assert (one["podNamespace"], one["podName"], one["static"]) == ("demo", "web", False)
    conditions = {each["type"]: each for each in one["conditions"]}
    isolation = conditions[labels.ISOLATION_READY]
    assert isolation["status"] == "CONDITION_STATUS_TRUE"
    assert isolation["reason"] == "Enforced"
    assert isolation["source"] == "CONDITION_SOURCE_PODGATE"
    known = pod_of(report, "web")
    assert known is not None
    assert podgate_pods(operator, "--uid", known.uid)["pods"][0]["podName"] == "web"
    with urllib.request.urlopen(f"http://{report.http_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    total = next(line for line in lines if line.startswith("pod_info_endpoint_requests_total "))
    # Only this metric counts watches, including those that were too early.
    assert float(total.split()[1]) >= 4
    assert "pod_info_endpoint_requests_list 1.0" in lines
    assert "pod_info_endpoint_requests_get 1.0" in lines
    for method in ("get", "list", "watch"):
        assert any(line.startswith(f"pod_info_endpoint_errors_{method} ") for line in lines)
    operator.stop(signal.SIGKILL)
    operator.start()
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    again = podgate_pods(operator)
    assert again["instanceId"] != state["instanceId"]
    assert [each["podName"] for each in again["pods"]] == ["web"]


def test_disabled_feature_is_an_error_with_what_to_do(operator: AgentProcess, lab: Lab) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.start()
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    operator.stop(signal.SIGKILL)
    operator.start("--feature-gates", "PodInfoAPI=false")
    report = operator.wait_for("the gate", isolated_as("web", "Enforced"))
    refused = operator.run("pods", "--run-directory", str(operator.run_directory))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "feature gate PodInfoAPI is off on this node" in refused.stderr
    with urllib.request.urlopen(f"http://{report.http_address}/metrics", timeout=10) as answer:
        assert b"pod_info" not in answer.read()
    operator.stop(signal.SIGKILL)
    operator.start("--feature-gates", "PodInfoAPI=true")
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    assert [each["podName"] for each in podgate_pods(operator)["pods"]] == ["web"]
    wrong = operator.run("run", "--manifests", "/", "--feature-gates", "PodInfo=true")
    assert wrong.returncode == 2
    assert "known: PodInfoAPI" in wrong.stderr


_READ_ONLY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
directory = os.fsencode(sys.argv[1])
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
assert libc.unshare(0x20000) == 0
assert libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
assert libc.mount(directory, directory, None, MS_BIND, None) == 0
assert libc.mount(None, directory, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None) == 0
path = sys.argv[1] + "/podinfo.sock"
socket.socket(socket.AF_UNIX).connect(path)
for change in (lambda: os.unlink(path), lambda: socket.socket(socket.AF_UNIX).bind(path + "2")):
    try:
        change()
    except OSError as error:
        print(error.strerror)
"""


def test_root_of_a_container_with_the_directory_mounted_read_only_replaces_no_socket(
    operator: AgentProcess, lab: Lab
) -> None:
    """As docs/podinfo.md has it; a connection needs no more."""
    operator.write_manifest(lab.add_pod("web", 1), mode="enforce", container=LISTENING)
    operator.start()
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    directory = operator.run_directory / "podinfo"
    done = subprocess.run(
        [sys.executable, "-c", _READ_ONLY, str(directory)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Read-only file system"] * 2
    assert (directory / "podinfo.sock").is_socket()

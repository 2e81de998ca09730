"""`podgate explain` on a node, with an agent, and after it was killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, condition_of
from agent.linux.procfs import Procfs
from bpf import pins
from tests.kernel import admitting, cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.polling import wait_until
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT, OTHER_PORT = 8080, 8081
LISTENING = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
CONNECT = """
import socket, sys
sock = socket.socket()
sock.settimeout(float(sys.argv[3]))
sys.exit(1 if sock.connect_ex((sys.argv[1], int(sys.argv[2]))) else 0)
"""


def explain(operator: AgentProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and answer."""
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    done = operator.run("explain", *arguments, "-o", "json", *where)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def flow(operator: AgentProcess, source: str, to: str, port: int) -> tuple[int, dict[str, Any]]:
    return explain(operator, "--from", source, "--to", to, "--port", str(port))


def step_names(answer: dict[str, Any]) -> list[str]:
    return [step["name"] for step in answer["steps"]]


@pytest.fixture
def source(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def web(lab: labs.Lab) -> Iterator[labs.LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT), pod.listen(OTHER_PORT):
        yield pod


def start(operator: AgentProcess, pod: labs.LabPod, source: Cgroup, mode: str) -> None:
    operator.write_manifest(pod, mode=mode, container=LISTENING)
    rules = operator.manifests.parent / "rules.yaml"
    rules.write_text(admitting.policy(source.path, OTHER_PORT))
    operator.start("--rules", str(rules))
    operator.wait_for(
        "the gate",
        lambda report: bool(
            (found := condition_of(report, pod.name, labels.ISOLATION_READY))
            and found.status == "True"
        ),
    )


def connects(source: Cgroup, address: str, port: int, seconds: float) -> bool:
    command = [*BARE_PYTHON, "-c", CONNECT, address, str(port), str(seconds)]
    return source.run(command).returncode == 0


def test_flow_is_explained_with_the_agent_and_after_it_was_killed(
    operator: AgentProcess, web: labs.LabPod, source: Cgroup
) -> None:
    start(operator, web, source, "enforce")
    kubelet = operator.kubelet[1]
    for is_alive in (True, False):
        if not is_alive:
            operator.stop(signal.SIGKILL)
        status, answer = flow(operator, f"cgroup:{source.path}", "demo/web", PORT)
        assert status == 1
        assert (answer["verdict"], answer["reason"]) == ("drop", "node")
        assert not connects(source, web.ipv4, PORT, traffic.DROPPED_AFTER_SECONDS)
        assert answer["agent"]["state"] == ("alive" if is_alive else "dead")
        assert (answer["target"]["pod"], answer["target"]["mode"]) == ("web", "enforce")
        (change,) = answer["changes"]
        assert source.path in change["policy"]
        assert f"port: {PORT}" in change["policy"]
        (miss,) = answer["nearMisses"]
        assert (miss["policy"], miss["mismatch"]) == ("admits-the-test", "port")
        assert miss["text"] == f"admits this source to TCP {OTHER_PORT}, not to TCP {PORT}"

        status, answer = flow(operator, f"cgroup:{source.path}", "demo/web", OTHER_PORT)
        assert status == 0
        assert (answer["verdict"], answer["reason"]) == ("pass", "rule")
        assert connects(source, web.ipv4, OTHER_PORT, traffic.LIMIT_SECONDS)
        (rule,) = [rule for rule in answer["rules"] if not rule["mismatch"]]
        assert (rule["policy"], rule["ports"]) == ("admits-the-test", str(OTHER_PORT))
        assert rule["source"] == f"cgroup {source.path}"

        status, answer = flow(operator, kubelet, "demo/web", PORT)
        assert (status, answer["reason"]) == (0, "probe")
        assert answer["source"]["isKubelet"]


def test_processes_of_host_and_pod_are_distinguished(
    operator: AgentProcess, web: labs.LabPod, source: Cgroup
) -> None:
    start(operator, web, source, "audit")
    status, answer = flow(operator, f"pid:{os.getpid()}", web.ipv6, PORT)
    assert status == 0
    assert (answer["verdict"], answer["reason"]) == ("would-drop", "node")
    with labs.popen_in(web.netns, ["sleep", "600"]) as inside:
        try:
            host = Procfs().namespace("self", "net")
            wait_until(
                "its namespace", lambda: Procfs().namespace(inside.pid, "net") not in (host, None)
            )
            status, answer = flow(operator, f"pid:{inside.pid}", web.ipv6, PORT)
        finally:
            inside.kill()
    assert (status, answer["verdict"], answer["decidedBy"]) == (0, "pass", "not-judged")
    assert step_names(answer) == ["origin"]


def test_pod_is_well_while_an_agent_runs_and_not_after_it_was_killed(
    operator: AgentProcess, web: labs.LabPod, source: Cgroup
) -> None:
    start(operator, web, source, "enforce")
    operator.wait_for(
        "its probes",
        lambda report: bool(
            (found := condition_of(report, web.name, labels.PROBES_PASSING))
            and found.status == "True"
        ),
    )
    status, answer = explain(operator, "pod", "web")
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert (status, answer["isWell"], set(states.values())) == (0, True, {"ok"}), answer
    assert list(states)[:4] == ["agent", "mode", "network namespace", "gate"]

    operator.stop(signal.SIGKILL)
    status, answer = explain(operator, "pod", "web")
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert (status, answer["isWell"], answer["fromAgent"]) == (1, False, False)
    assert (states["agent"], states["gate"]) == ("problem", "ok")


def test_first_problem_of_a_pod_is_named(
    operator: AgentProcess, web: labs.LabPod, source: Cgroup
) -> None:
    failing = {"readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 1}}
    operator.write_manifest(web, mode="enforce", container=failing)
    operator.start()
    operator.wait_for(
        "the failure",
        lambda report: bool(
            (found := condition_of(report, web.name, labels.PROBES_PASSING))
            and found.reason == "ProbeFailing"
        ),
    )
    status, answer = explain(operator, "pod", "demo/web")
    problems = [check for check in answer["checks"] if check["state"] != "ok"]
    assert status == 1
    assert [problem["name"] for problem in problems] == ["probes", "probe", labels.PROBES_PASSING]
    assert "podgate probe --pod demo/web" in problems[0]["next"]


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agent", "explain", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_nothing_pinned_and_no_agent_is_status_3(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    where = ("--run-directory", str(tmp_path), "--bpffs", str(fresh_pins.bpffs))
    for arguments in (("--from", "kernel", "--to", "198.18.1.1", "--port", "80"), ("pod", "web")):
        done = command(*arguments, *where)
        assert done.returncode == 3
        assert "nothing is pinned" in done.stderr

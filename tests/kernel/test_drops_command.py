"""`podgate drops` on a node: verdicts of their time, sources that a rule admits by now, scans."""

import json
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from tests.kernel import admitting, cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_agent import isolated_as
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT = 8080
SEND = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(int(sys.argv[2]), int(sys.argv[3]) + 1):
    sock.sendto(b"", (sys.argv[1], port))
"""


@pytest.fixture
def web(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


@pytest.fixture
def source(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


def send(source: Cgroup, pod: LabPod, first: int, last: int) -> None:
    command = [*BARE_PYTHON, "-c", SEND, pod.ipv4, str(first), str(last)]
    source.run(command).check_returncode()


def drops(operator: AgentProcess, source: Cgroup, *arguments: str) -> list[dict[str, Any]]:
    """Of this source, as JSON."""
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    done = operator.run("drops", *arguments, "-o", "json", *where)
    assert done.returncode == 0, done.stderr
    return [one for one in json.loads(done.stdout)["sources"] if one["cgroup"] == source.path]


def counted(found: list[dict[str, Any]]) -> set[tuple[str, str, int, bool]]:
    return {(one["mode"], one["verdict"], one["packets"], one["isAdmitted"]) for one in found}


def mark(operator: AgentProcess) -> None:
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    assert operator.run("drops", "--mark", *where).returncode == 0


def test_each_mode_is_a_line_and_a_rule_marks_it_with_and_without_an_agent(
    operator: AgentProcess, web: LabPod, source: Cgroup
) -> None:
    rules = operator.manifests.parent / "rules"
    rules.mkdir()
    operator.write_manifest(web, mode="audit", container={})
    operator.start("--rules", str(rules))
    operator.wait_for("audit", isolated_as("web", "Audit"))
    for _ in range(5):
        send(source, web, PORT, PORT)
    mark(operator)
    operator.write_manifest(web, mode="enforce", container={})
    operator.wait_for("enforce", isolated_as("web", "Enforced"))
    send(source, web, PORT, PORT)
    assert counted(drops(operator, source)) == {
        ("audit", "would-drop", 5, False),
        ("enforce", "drop", 1, False),
    }
    assert counted(drops(operator, source, "--since", "mark")) == {("enforce", "drop", 1, False)}
    _admit(rules, source)
    admitted = {("audit", "would-drop", 5, True), ("enforce", "drop", 1, True)}
    operator.wait_for("the rule", lambda _: counted(drops(operator, source)) == admitted)
    operator.stop(signal.SIGKILL)
    assert counted(drops(operator, source)) == admitted
    assert counted(drops(operator, source, "--since", "mark")) == {("enforce", "drop", 1, True)}


def test_scan_is_one_line(operator: AgentProcess, web: LabPod, source: Cgroup) -> None:
    operator.write_manifest(web, mode="audit", container={})
    operator.start()
    operator.wait_for("audit", isolated_as("web", "Audit"))
    send(source, web, 1, 1100)
    (found,) = drops(operator, source)
    assert (found["packets"], found["hasManyPorts"], found["portCount"]) == (1100, True, 0)
    assert (found["lowestPort"], found["highestPort"]) == (1, 1024)
    with cgroups.cgroup() as other:
        send(other, web, 100, 119)
        (few,) = drops(operator, other)
    assert (few["packets"], few["portCount"], few["highestPort"]) == (20, 20, 119)


def _admit(rules: pathlib.Path, source: Cgroup) -> None:
    unfinished = rules / ".a"
    unfinished.write_text(admitting.policy(source.path, PORT, "UDP"), encoding="utf-8")
    unfinished.rename(rules / "a.yaml")

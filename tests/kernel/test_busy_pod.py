"""A pod that changes its own network as fast as it can delays neither other pods nor the agent.

These tests show the whole on a real kernel, and no single limit: at the rate of one process, a pass
ends now and then without any. That changes are read 20 times a second, that a pod has a pace, and
that a pass handles each pod once is shown by tests/agent/linux/test_link_monitor.py and
tests/agent/app/test_reconciler.py.
"""

import contextlib
import itertools
import pathlib
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest
import yaml

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of, drop_result, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from tests.kernel import cgroups, traffic
from tests.kernel.test_agent import is_dropped, reaches
from tests.kernel.test_policies import cgroup, policy

pytestmark = pytest.mark.kernel

PORT = 5300


@contextlib.contextmanager
def changing(pod: LabPod) -> Iterator[None]:
    """Add and delete addresses in the pod's namespace without a pause: some thousand a second.

    Each is deleted after the next one exists, so every read finds one.
    """
    ended = threading.Event()
    command = ["nsenter", f"--net={pod.netns.path}", "ip", "-batch", "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    commands = process.stdin

    def change() -> None:
        previous: list[str] = []
        for number in itertools.cycle(range(1, 201)):
            following = [f"198.18.99.{number}/32", f"fd00:18:99::{number:x}/128"]
            if ended.is_set():
                following = []
            commands.writelines(f"address add {address} dev eth0\n" for address in following)
            commands.writelines(f"address del {address} dev eth0\n" for address in previous)
            previous = following
            if not following:
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        status = process.poll()
        ended.set()
        thread.join()
        process.communicate()
        assert status is None, "the changes ended before their time"


def is_gated(report: AgentReport, name: str) -> bool:
    pod = pod_of(report, name)
    return pod is not None and bool(pod.gates)


def is_enforced(report: AgentReport, name: str) -> bool:
    condition = condition_of(report, name, labels.ISOLATION_READY)
    return condition is not None and (condition.status, condition.reason) == ("True", "Enforced")


def unconfirmed(report: AgentReport, name: str) -> list[str]:
    pod = pod_of(report, name)
    return list(pod.unconfirmed) if pod else []


def replies(report: AgentReport, name: str) -> int:
    pod = pod_of(report, name)
    assert pod is not None
    return sum(gate.packets.get("pass", {}).get("reply", 0) for gate in pod.gates)


def is_answered(pod: LabPod, version: int) -> bool:
    """Whether the pod gets a host process' answer to its question."""
    family = traffic.family(version)
    with (
        socket.socket(family, socket.SOCK_DGRAM) as server,
        pod.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        server.settimeout(traffic.LIMIT_SECONDS)
        client.settimeout(traffic.LIMIT_SECONDS)
        server.bind((traffic.NODE[version], PORT))
        client.sendto(b"question", (traffic.NODE[version], PORT))
        _, whence = server.recvfrom(64)
        server.sendto(b"answer", whence[:2])
        return client.recv(64) == b"answer"


@pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
def test_a_new_pod_becomes_ready_and_gets_its_answers_beside_a_busy_one(
    operator: AgentProcess, lab: Lab, is_bridged: bool
) -> None:
    busy = lab.add_pod("busy", 1, bridged=is_bridged)
    operator.write_manifest(busy, mode="enforce", container={})
    operator.start()
    operator.wait_for("the busy pod's gate", lambda report: is_gated(report, "busy"))
    with changing(busy):
        new = lab.add_pod("new", 2, bridged=is_bridged)
        operator.write_manifest(new, mode="enforce", container={})
        operator.wait_for("the new pod's condition", lambda report: is_enforced(report, "new"))
        # It has no grace period any more: an answer passes because its question is known.
        operator.wait_for("its reply table", lambda _: any(of_pod(operator, "new")))
        assert is_answered(new, 4)
        assert is_answered(new, 6)
        report = operator.wait_for("both answers", lambda report: replies(report, "new") == 2)
        for pod in (new, busy):
            observed = attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=True)
            assert observed == drop_result(report)


def test_the_last_change_of_a_busy_pod_is_found(operator: AgentProcess, lab: Lab) -> None:
    busy = lab.add_pod("busy", 1)
    operator.write_manifest(busy, mode="enforce", container={})
    operator.start()
    operator.wait_for("its gate", lambda report: is_gated(report, "busy"))
    with changing(busy):
        operator.wait_for("a change", lambda report: bool(unconfirmed(report, "busy")))
    enter = ["nsenter", f"--net={busy.netns.path}"]
    subprocess.run([*enter, "ip", "address", "add", "198.18.98.7/32", "dev", "eth0"], check=True)
    operator.wait_for(
        "the last change",
        lambda report: unconfirmed(report, "busy") == ["198.18.98.7"],
    )


def test_an_agent_that_starts_beside_a_busy_pod_syncs_and_applies_policies(
    operator: AgentProcess, lab: Lab, tmp_path: pathlib.Path
) -> None:
    """Both need the end of a pass, which a pod that is marked again and again must not delay."""
    busy, web = lab.add_pod("busy", 1), lab.add_pod("web", 2)
    for pod in (busy, web):
        operator.write_manifest(pod, mode="enforce", container={})
    rules = tmp_path / "rules"
    rules.mkdir()
    with changing(busy), cgroups.cgroup() as service, web.listen(PORT):
        operator.start("--rules", str(rules))
        operator.wait_for("a synced agent", lambda report: report.is_synced)
        assert is_dropped(service, web, PORT)
        (rules / "a.yaml").write_text(yaml.safe_dump(policy("service", cgroup(service), PORT)))
        operator.wait_for("the policy", lambda _: reaches(service, web, PORT))


def of_pod(operator: AgentProcess, name: str) -> list[object]:
    lines = operator.log_lines(Event.REPLY_TABLE_READY)
    return [line for line in lines if str(line["pod"]).endswith(f"/{name}")]

"""A gate attached to a running pod passes the replies to the pod's pending flows."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from tests.kernel import traffic

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PORT = 5300
READY = Event.REPLY_TABLE_READY
GRACE = Event.GRACE_PERIOD_STARTED


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    return lab.add_pod("asker", 1)


@contextlib.contextmanager
def pending_flow(pod: LabPod, version: int, *, is_connected: bool) -> Iterator[socket.socket]:
    """A datagram of the pod that a host socket has received and answers when the block is left."""
    with (
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as server,
        pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as client,
    ):
        server.settimeout(traffic.LIMIT_SECONDS)
        server.bind(("", PORT))
        where = (traffic.NODE[version], PORT)
        if is_connected:
            client.connect(where)
        client.sendto(b"question", where)
        _, whence = server.recvfrom(64)
        server.connect(whence[:2])
        yield server
        server.send(b"answer")
        assert client.recv(64) == b"answer"


def guard(operator: AgentProcess, pod: LabPod, event: Event) -> None:
    operator.write_manifest(pod, mode="enforce", container={})
    operator.start()
    operator.wait_for(event.message, lambda _: any(operator.log_lines(event)))


def passed(report: AgentReport, reason: str) -> int:
    pod = pod_of(report, "asker")
    assert pod is not None
    return sum(gate.packets.get("pass", {}).get(reason, 0) for gate in pod.gates)


@VERSIONS
def test_reply_to_a_pending_flow_passes_and_nothing_else_does(
    operator: AgentProcess, pod: LabPod, version: int
) -> None:
    with pending_flow(pod, version, is_connected=True):
        guard(operator, pod, READY)
        with socket.socket(traffic.family(version), socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"hello", (traffic.address(pod, version), PORT))
    report = operator.wait_for("the answer counted", lambda r: passed(r, "reply") == 1)
    assert passed(report, "grace") == 0


def test_reply_to_an_unconnected_socket_passes_in_the_grace_period(
    operator: AgentProcess, pod: LabPod
) -> None:
    with pending_flow(pod, 4, is_connected=False):
        guard(operator, pod, GRACE)
    operator.wait_for("the answer counted", lambda r: passed(r, "grace") == 1)


def test_new_pod_gets_no_grace_period(operator: AgentProcess, pod: LabPod) -> None:
    guard(operator, pod, READY)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"hello", (pod.ipv4, PORT))
    report = operator.wait_for("the report", lambda r: True)
    assert passed(report, "grace") == 0

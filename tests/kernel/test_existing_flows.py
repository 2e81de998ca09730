"""Existing flows, which the host opened before enforcement: counted, and closed only with
`--close-existing-flows`."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from tests.kernel import cgroups, traffic

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PORT = 8080
NODE_PORT = 8090


@pytest.fixture
def web(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


def existing_flows(report: AgentReport) -> int:
    pod = pod_of(report, "web")
    return pod.existing_flows if pod else 0


def start(operator: AgentProcess, pod: LabPod, *extra: str, mode: str = "enforce") -> None:
    operator.write_manifest(pod, mode=mode, container={})
    operator.start(*extra)


@contextlib.contextmanager
def connected(pod: LabPod, where: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The host's end and the pod's end of a connection that the host opened."""
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    with pod.listen(PORT) as listener, socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(traffic.LIMIT_SECONDS)
        client.connect((where, PORT))
        server, _ = listener.accept()
        with server:
            server.settimeout(traffic.LIMIT_SECONDS)
            yield client, server


def assert_talks(one: socket.socket, other: socket.socket) -> None:
    for source, receiver in ((one, other), (other, one)):
        source.send(b"hello")
        assert receiver.recv(64) == b"hello"


@pytest.mark.parametrize("where", ["{0.ipv4}", "{0.ipv6}", "::ffff:{0.ipv4}"])
def test_existing_connection_stays_open_and_is_counted(
    operator: AgentProcess, web: LabPod, where: str
) -> None:
    with connected(web, where.format(web)) as (client, server):
        start(operator, web)
        report = operator.wait_for("the flow counted", lambda r: existing_flows(r) == 1)
        assert_talks(client, server)
        done = operator.run("status", "--run-directory", str(operator.run_directory))
    assert any(line.get("flows") == 1 for line in operator.log_lines())
    assert "demo/web: Flows that the host opened before enforcement are still open" in done.stdout
    assert report.pods


@VERSIONS
def test_existing_connection_is_closed_with_the_flag(
    operator: AgentProcess, web: LabPod, version: int
) -> None:
    with connected(web, traffic.address(web, version)) as (client, server):
        start(operator, web, "--close-existing-flows")
        with pytest.raises(ConnectionResetError):
            server.recv(64)
        with pytest.raises(ConnectionAbortedError):
            client.recv(64)
    # Logged once the scan that closed them returns.
    operator.wait_for("the log", lambda _: any(operator.log_lines(Event.EXISTING_FLOWS_CLOSED)))
    operator.wait_for("nothing left", lambda r: existing_flows(r) == 0)


def test_switch_from_audit_to_enforce_closes_existing_flows(
    operator: AgentProcess, web: LabPod
) -> None:
    with connected(web, web.ipv4) as (client, server):
        start(operator, web, "--close-existing-flows", mode="audit")
        operator.wait_for("the gate", lambda r: bool((p := pod_of(r, "web")) and p.gates))
        assert_talks(client, server)
        operator.write_manifest(web, mode="enforce", container={})
        with pytest.raises(ConnectionResetError):
            server.recv(64)


@VERSIONS
def test_flows_that_the_pod_opened_are_neither_counted_nor_closed(
    operator: AgentProcess, web: LabPod, version: int
) -> None:
    with (
        connected(web, web.ipv4) as (_, server),
        traffic.listen_on_node(NODE_PORT) as listener,
        web.open_socket(traffic.family(version), socket.SOCK_STREAM) as client,
    ):
        client.connect((traffic.NODE[version], NODE_PORT))
        accepted, _ = listener.accept()
        orphaned = web.open_socket(traffic.family(version), socket.SOCK_STREAM)
        orphaned.connect((traffic.NODE[version], NODE_PORT))
        left, _ = listener.accept()
        listener.close()  # its listener is closed, and still the pod opened it
        with accepted, orphaned, left:
            start(operator, web, "--close-existing-flows")
            with pytest.raises(ConnectionResetError):
                server.recv(64)
            assert_talks(client, accepted)
            assert_talks(orphaned, left)
            report = operator.wait_for("the report", lambda r: True)
            assert existing_flows(report) == 0


def test_flow_of_a_possible_kubelet_is_counted_but_not_closed(
    operator: AgentProcess, web: LabPod
) -> None:
    probe = {"readinessProbe": {"tcpSocket": {"port": PORT}}}
    with connected(web, web.ipv4) as (client, server):
        operator.write_manifest(web, mode="enforce", container=probe)
        operator.start("--close-existing-flows", "--kubelet", "cgroup:/podgate-test-nobody")
        operator.wait_for("the flow counted", lambda r: existing_flows(r) == 1)
        assert_talks(client, server)


CONNECT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""


def test_flows_that_a_rule_admits_stay_open(operator: AgentProcess, web: LabPod) -> None:
    with cgroups.cgroup() as kubelet, cgroups.cgroup() as other, web.listen(PORT) as listener:
        accepted = []
        for group in (kubelet, other):
            process = group.popen(
                [sys.executable, "-c", CONNECT, web.ipv4, str(PORT)], stdin=subprocess.PIPE
            )
            listener.settimeout(traffic.LIMIT_SECONDS)
            accepted.append((process, listener.accept()[0]))
        probe = {"readinessProbe": {"tcpSocket": {"port": PORT}}}
        operator.write_manifest(web, mode="enforce", container=probe)
        operator.start("--close-existing-flows", "--kubelet", f"cgroup:{kubelet.path}")
        (ours, kept), (theirs, ended) = accepted
        ended.settimeout(traffic.LIMIT_SECONDS)
        with pytest.raises(ConnectionResetError):
            ended.recv(64)
        operator.wait_for("the kubelet found", lambda r: r.kubelet == kubelet.path)
        report = operator.wait_for("nothing left to close", lambda r: existing_flows(r) == 0)
        assert report.pods
        assert ours.stdin
        ours.stdin.close()
        kept.settimeout(traffic.LIMIT_SECONDS)
        assert kept.recv(64) == b""  # by its own end, in order
        for process in (ours, theirs):
            if process.stdin:
                process.stdin.close()
            process.wait(traffic.LIMIT_SECONDS)
        kept.close()
        ended.close()


@VERSIONS
def test_answered_datagrams_are_an_existing_flow(
    operator: AgentProcess, web: LabPod, version: int
) -> None:
    with (
        web.open_socket(traffic.family(version), socket.SOCK_DGRAM) as server,
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as client,
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as unanswered,
    ):
        server.bind(("", PORT))
        for sock in (client, unanswered):
            sock.settimeout(traffic.LIMIT_SECONDS)
            sock.connect((traffic.address(web, version), PORT))
        start(operator, web, "--close-existing-flows", mode="audit")
        operator.wait_for("a gate with a reply table", lambda _: has_reply_table(operator))
        client.send(b"question")
        _, whence = server.recvfrom(64)
        server.sendto(b"answer", whence)
        assert client.recv(64) == b"answer"
        operator.write_manifest(web, mode="enforce", container={})
        with pytest.raises(ConnectionAbortedError):
            client.recv(64)
        assert unanswered.getpeername()[1] == PORT


def has_reply_table(operator: AgentProcess) -> bool:
    events = (Event.REPLY_TABLE_READY, Event.GRACE_PERIOD_STARTED)
    return any(operator.log_lines(event) for event in events)

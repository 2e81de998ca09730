"""A stand-in kubelet probes unmodified pods under enforce, also after restarts of it and of the
agent; other host processes are blocked.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from bpf import loader, pins
from bpf.node_config import NodeConfig
from tests.kernel import cgroups, offers, standin
from tests.kernel.standin import KubeletStub
from tests.polling import PATIENCE, wait_until

pytestmark = pytest.mark.kernel

HTTP, ELSEWHERE, TCP, GRPC = 8080, 8081, 8082, 8083
ROUNDS = 10

# Redirects each client to another port, as an app's front end does; no pod declares that port.
REDIRECT = """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        host = self.headers["Host"].rpartition(":")[0]
        self.send_response(302)
        self.send_header("Location", f"http://{host}:{sys.argv[2]}/healthz")
        self.end_headers()
    def log_message(self, *arguments):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
Server(("::", int(sys.argv[1])), Handler).serve_forever()
"""

Start = Callable[[cgroups.Cgroup, str], KubeletStub]


@pytest.fixture
def operator(operator: AgentProcess) -> AgentProcess:
    """Its agents search for a process named kubelet."""
    operator.kubelet = ()
    return operator


@pytest.fixture
def pods(lab: labs.Lab) -> Iterator[list[labs.LabPod]]:
    """One that redirects to another port, one with a bare port, one that speaks gRPC."""
    web, bare, rpc = (lab.add_pod(name, n) for n, name in enumerate(("web", "bare", "rpc"), 1))
    demo = [sys.executable, "-m", "agent.operate.demo.servers"]
    commands = (
        (web, [sys.executable, "-c", REDIRECT, str(HTTP), str(ELSEWHERE)], HTTP),
        (web, [*demo, "http", str(ELSEWHERE)], ELSEWHERE),
        (bare, [*demo, "tcp", str(TCP)], TCP),
        (rpc, [*demo, "grpc", str(GRPC)], GRPC),
    )
    servers = [labs.popen_in(pod.netns, command) for pod, command, _ in commands]
    try:
        for pod, _, port in commands:
            wait_for_listener(pod, port)
        yield [web, bare, rpc]
    finally:
        for server in servers:
            server.kill()
            server.wait()


def wait_for_listener(pod: labs.LabPod, port: int) -> None:
    deadline = time.monotonic() + 60 * PATIENCE
    while time.monotonic() < deadline:
        with contextlib.closing(pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail(f"nothing listens on {port} in {pod.name}")


@pytest.fixture
def targets(pods: list[labs.LabPod]) -> list[str]:
    kinds = zip(pods, (("http", HTTP), ("tcp", TCP), ("grpc", GRPC)), strict=True)
    return [
        f"{kind},{host},{port}"
        for pod, (kind, port) in kinds
        for host in (pod.ipv4, f"[{pod.ipv6}]")
    ]


@pytest.fixture
def start_at() -> Iterator[Callable[..., KubeletStub]]:
    started: list[KubeletStub] = []

    def make(group: cgroups.Cgroup, name: str, targets: list[str]) -> KubeletStub:
        started.append(KubeletStub(group, name, targets))
        return started[-1]

    yield make
    for stand_in in started:
        stand_in.end()


@pytest.fixture
def start(start_at: Callable[..., KubeletStub], targets: list[str]) -> Start:
    return lambda group, name: start_at(group, name, targets)


@pytest.fixture
def enforced(operator: AgentProcess, pods: list[labs.LabPod]) -> AgentProcess:
    """An agent that enforces for the pods, whose specs contain nothing of podgate."""
    web, bare, rpc = pods
    probes = (
        (web, {"httpGet": {"path": "/healthz", "port": HTTP}}),
        (bare, {"tcpSocket": {"port": TCP}}),
        (rpc, {"grpc": {"port": GRPC}}),
    )
    for pod, handler in probes:
        probe = {"periodSeconds": 1, "failureThreshold": 1, **handler}
        operator.write_manifest(pod, mode="enforce", container={"livenessProbe": probe})
    run_agent(operator)
    return operator


def run_agent(operator: AgentProcess) -> None:
    operator.start()
    operator.wait_for(
        "every pod isolated",
        lambda report: report.is_synced and len([p for p in report.pods if p.gates]) == 3,
    )


def follows(group: cgroups.Cgroup) -> Callable[[AgentReport], bool]:
    return lambda report: report.kubelet == group.path


def healthy(targets: list[str], rounds: int = ROUNDS) -> dict[str, list[str]]:
    return {target: [""] * rounds for target in targets}


def test_no_kubelet_probe_fails_while_the_agent_is_killed_or_stopped(
    enforced: AgentProcess, targets: list[str], start: Start
) -> None:
    with cgroups.cgroup() as group:
        kubelet = start(group, "kubelet")
        enforced.wait_for("the kubelet followed", follows(group))
        assert kubelet.probe(ROUNDS) == healthy(targets)
        os.kill(enforced.pid, signal.SIGSTOP)
        assert kubelet.probe(ROUNDS) == healthy(targets)
        os.kill(enforced.pid, signal.SIGCONT)
        enforced.stop(signal.SIGKILL)
        assert kubelet.probe(ROUNDS) == healthy(targets)
        run_agent(enforced)
        assert kubelet.probe(ROUNDS) == healthy(targets)


def test_kubelet_restarted_in_a_new_cgroup_stays_admitted(
    enforced: AgentProcess, targets: list[str], start: Start
) -> None:
    with cgroups.cgroup() as first, cgroups.cgroup() as second:
        kubelet = start(first, "kubelet")
        enforced.wait_for("the kubelet followed", follows(first))
        kubelet.end()
        kubelet = start(second, "kubelet")
        enforced.wait_for("the kubelet followed", follows(second))
        assert kubelet.probe(ROUNDS) == healthy(targets)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_an_agent_only_the_kubelet_unit_is_admitted_however_often_it_restarts(
    enforced: AgentProcess, targets: list[str], start: Start, number: signal.Signals
) -> None:
    """systemd makes a unit's cgroup again at each start, at the same path and with a new id."""
    with (
        cgroups.cgroup() as system,
        cgroups.cgroup("kubelet.service", below=system) as unit,
        cgroups.cgroup("other.service", below=system) as other,
    ):
        kubelet = start(unit, "kubelet")
        enforced.wait_for("the kubelet followed", follows(unit))
        if number is signal.SIGKILL:
            enforced.stop(number)
        else:
            os.kill(enforced.pid, number)
        try:
            stranger = start(other, "kubelet")
            for _ in range(5):
                before = unit.id
                kubelet.end()
                cgroups.remove(unit)
                unit.directory.mkdir()
                assert unit.id != before
                kubelet = start(unit, "kubelet")
                assert kubelet.probe() == healthy(targets, rounds=1)
                beat_long_ago(enforced.bpffs)
                assert kubelet.probe() == healthy(targets, rounds=1)
                assert_nothing_succeeds(stranger, targets)
            stranger.end()
        finally:
            if number is signal.SIGSTOP:
                os.kill(enforced.pid, signal.SIGCONT)
        if number is signal.SIGKILL:
            run_agent(enforced)
        enforced.wait_for("the kubelet followed", follows(unit))
        assert kubelet.probe() == healthy(targets, rounds=1)


def test_kubelet_restarted_without_an_agent_reaches_a_pod_that_was_created_since(
    lab: labs.Lab, operator: AgentProcess, start_at: Callable[..., KubeletStub]
) -> None:
    """The pod has no gate: the default-deny table decides, and does not open within a day."""
    offers.need_netns_cookie()
    with cgroups.cgroup() as unit, cgroups.cgroup() as other:
        kubelet = start_at(unit, "kubelet", [])
        operator.start("--mode", "enforce")
        operator.wait_for("the kubelet followed", follows(unit))
        wait_until("the default-deny table", lambda: "timeout 1d" in alive_families())
        operator.stop(signal.SIGKILL)
        kubelet.end()
        cgroups.remove(unit)
        unit.directory.mkdir()
        beat_long_ago(operator.bpffs)
        pod = lab.add_pod("late", 9)
        targets = [f"tcp,{pod.ipv4},{TCP}", f"tcp,[{pod.ipv6}],{TCP}"]
        with pod.listen(TCP):
            assert start_at(unit, "kubelet", targets).probe() == healthy(targets, rounds=1)
            assert_nothing_succeeds(start_at(other, "kubelet", targets), targets)


def alive_families() -> str:
    """The families for which the default-deny table has a heartbeat, with their timeouts."""
    command = ["nft", "list", "set", "inet", "podgate", "alive"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def beat_long_ago(bpffs: os.PathLike[str]) -> None:
    """As if the last heartbeat had been ten minutes ago, or when the machine booted."""
    loaded = asyncio.run(loader.load(pins.Pins(bpffs)))
    try:
        NodeConfig(loaded, now_ns=lambda: max(1, time.monotonic_ns() - int(600e9))).beat()
    finally:
        loaded.close()


def assert_nothing_succeeds(stranger: KubeletStub, targets: list[str]) -> None:
    found = stranger.probe()
    assert found.keys() == set(targets)
    assert all(problem for problems in found.values() for problem in problems)


def test_impostor_that_waits_for_a_restart_reaches_no_pod_and_the_kubelet_does(
    enforced: AgentProcess, targets: list[str], start: Start
) -> None:
    with cgroups.cgroup() as unit, cgroups.cgroup() as other:
        kubelet = start(unit, "kubelet")
        enforced.wait_for("the kubelet followed", follows(unit))
        impostor = start(other, standin.WITHOUT_CAPABILITIES + "kubelet")
        kubelet.end()
        enforced.wait_for("the kubelet missed", lambda report: report.kubelet is None)
        assert_nothing_succeeds(impostor, targets)
        kubelet = start(unit, "kubelet")
        enforced.wait_for("the kubelet followed", follows(unit))
        assert kubelet.probe() == healthy(targets, rounds=1)
        assert_nothing_succeeds(impostor, targets)


def test_from_any_other_cgroup_nothing_succeeds(
    enforced: AgentProcess, targets: list[str], start: Start
) -> None:
    with cgroups.cgroup() as group, cgroups.cgroup() as other, cgroups.cgroup(below=group) as below:
        start(group, "kubelet")
        enforced.wait_for("the kubelet followed", follows(group))
        for stranger in (other, below):
            assert_nothing_succeeds(start(stranger, "intruder"), targets)

"""A verdict never outlives its time, its pod, or the processes that found it.

Each test lets podgate find that the pod is sick, so that the kubelet's probe gets 503, and then
stops something. From a known time on the probe must reach the pod itself, as without podgate.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import Launch
from agent.lab.lab import LabPod
from bpf import pins
from tests import polling
from tests.conftest import fresh_lab
from tests.kernel import answered, offers
from tests.kernel.answered import (
    CHECKED,
    FAST,
    HEALTHY,
    LASTING,
    PERIOD_SECONDS,
    PROXIED,
    RARE,
    SICK,
    TIMEOUT_SECONDS,
    Kubelet,
    Server,
)
from tests.kernel.strictnode import Node, strict_node
from tests.probes import servers

pytestmark = pytest.mark.kernel

# A verdict's longest time: its check has ended a timeout after its start.
LONGEST_SECONDS = PERIOD_SECONDS + 2 * TIMEOUT_SECONDS


@pytest.fixture(scope="module")
def node(
    launch: Launch, installed: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """A running agent. Tests that end it start it again."""
    offers.need_netns_cookie()
    with (
        fresh_lab() as lab,
        strict_node(lab, tmp_path_factory.mktemp("strict"), launch, installed) as made,
    ):
        answered.add(made, "lasting", 1, answered.probes(**LASTING))
        answered.add(made, "short", 2, answered.probes(**FAST))
        made.start()
        yield made


@contextlib.contextmanager
def sick(node: Node, name: str) -> Iterator[tuple[Kubelet, Server]]:
    """The probe of this pod gets 503."""
    pod = node.pods[name].pod
    with answered.serving(pod) as server, answered.kubelet(node, pod) as kubelet:
        server.is_healthy = False
        kubelet.until(SICK)
        yield kubelet, server


@pytest.fixture
def lasting(node: Node) -> Iterator[tuple[Kubelet, Server]]:
    with sick(node, "lasting") as made:
        yield made


@pytest.fixture
def kubelet(lasting: tuple[Kubelet, Server]) -> Kubelet:
    """Its probe gets 503, for as long as the agent runs."""
    return lasting[0]


@pytest.fixture
def server(lasting: tuple[Kubelet, Server]) -> Server:
    return lasting[1]


@pytest.fixture
def short(node: Node) -> Iterator[Kubelet]:
    """Its probe gets 503, by verdicts that end soon."""
    with sick(node, "short") as (kubelet, _):
        yield kubelet


def test_the_kubelets_probe_gets_what_podgate_found_and_never_reaches_the_pod(
    kubelet: Kubelet, server: Server
) -> None:
    before = len(server.requests)
    assert kubelet.results_after(0) == {SICK}
    server.is_healthy = True
    assert set(kubelet.until(HEALTHY)) <= {SICK, HEALTHY}
    server.is_healthy = False
    assert set(kubelet.until(SICK)) <= {SICK, HEALTHY}
    assert set(server.requests[before:]) == {CHECKED}


def test_a_request_that_is_not_the_probe_reaches_the_pod(kubelet: Kubelet) -> None:
    assert kubelet.probe("/own?") == PROXIED
    assert kubelet.probe("/hook") == PROXIED
    assert kubelet.probe() == SICK


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_verdict_ends_while_the_agent_is_frozen(node: Node, short: Kubelet) -> None:
    with frozen(node.operator.pid):
        ends = time.monotonic() + LONGEST_SECONDS
        assert set(short.until(PROXIED)) <= {SICK, PROXIED}
        assert short.results_after(ends) == {PROXIED}
    short.until(SICK)


def test_after_the_agent_is_killed_probes_reach_the_pod(node: Node, short: Kubelet) -> None:
    node.operator.stop(signal.SIGKILL)
    ends = time.monotonic() + LONGEST_SECONDS
    assert short.results_after(ends) == {PROXIED}
    node.start()
    short.until(SICK)


def test_while_the_relay_is_frozen_probes_reach_the_pod(node: Node, kubelet: Kubelet) -> None:
    relay = node.relay_pid()
    assert relay is not None
    # An agent that runs would replace the relay.
    with frozen(node.operator.pid), frozen(relay):
        kubelet.until(PROXIED)
        assert kubelet.results_after(0) == {PROXIED}
    kubelet.until(SICK)


def test_after_the_relay_is_killed_probes_reach_the_pod_until_there_is_another(
    node: Node, kubelet: Kubelet
) -> None:
    relay = node.relay_pid()
    assert relay is not None
    with frozen(node.operator.pid):
        os.kill(relay, signal.SIGKILL)
        kubelet.until(PROXIED)
        assert kubelet.results_after(0) == {PROXIED}
    kubelet.until(SICK)
    assert node.relay_pid() != relay


@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "agent frozen"])
def test_a_pod_with_the_address_of_another_never_gets_its_verdict(
    node: Node, is_frozen: bool
) -> None:
    # A verdict for an hour: whatever ends it sooner is not its age.
    before = answered.add(node, "before", 3, answered.probes(**RARE))
    with sick(node, "before"):
        pass
    with contextlib.ExitStack() as undo:
        if is_frozen:
            undo.enter_context(frozen(node.operator.pid))
        answered.remove(node, "before")
        pod = answered.add(node, "after", 3, answered.probes())
        undo.callback(answered.remove, node, "after")
        assert pod.ipv4 == before.ipv4
        undo.enter_context(answered.serving(pod))
        kubelet = undo.enter_context(answered.kubelet(node, pod))
        assert SICK not in {kubelet.probe() for _ in range(20)}
        if is_frozen:
            os.kill(node.operator.pid, signal.SIGCONT)
        assert SICK not in kubelet.until(PROXIED)
        assert kubelet.results_after(0) == {PROXIED}


# Servers that never end what they send, or send nothing, and what a check of each finds.
HOSTILE = {
    "silent": SICK,
    "drip": SICK,
    "endless-headers": SICK,
    "endless-body": HEALTHY,  # as the kubelet, podgate reads 10 KiB of it
    "reset": SICK,
    "half-close": SICK,
    "garbage": SICK,
}


@contextlib.contextmanager
def hostile_servers(pod: LabPod, folder: pathlib.Path) -> Iterator[dict[str, int]]:
    """Their ports in the pod, by behaviour."""
    cert, key = servers.certificate(folder)
    server = ("tests.probes.hostile_server", pod.ipv4, str(cert), str(key))
    process = subprocess.Popen(
        ["nsenter", f"--net={pod.netns.path}", sys.executable, "-m", *server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_checks_of_hostile_servers_end_in_time_for_an_answer(
    node: Node, tmp_path: pathlib.Path
) -> None:
    pod = node.lab.add_pod("hostile", 4)
    timing = {"periodSeconds": 2, "timeoutMilliseconds": 500}
    with hostile_servers(pod, tmp_path) as ports, answered.serving(pod):
        probes = [
            (
                answered.http_probe(f"/{name}"),
                {"http": {"port": ports[name]}, "ipFamily": "IPv4", **timing},
            )
            for name in HOSTILE
        ]
        answered.declare(node, pod, probes)
        with answered.kubelet(node, pod) as kubelet:
            for name, expected in HOSTILE.items():
                assert set(kubelet.until(expected, path=f"/{name}")) <= {PROXIED, expected}
    answered.remove(node, "hostile")


@pytest.mark.parametrize(
    ("kind", "target"), [("http", "localhost"), ("grpc", "pod"), ("tcp", "localhost")]
)
def test_answers_change_once_for_each_change_that_podgate_finds(
    node: Node, kind: str, target: str
) -> None:
    """So the failure at which the kubelet restarts is the first one and failureThreshold - 1."""
    handlers = {
        "http": answered.http_probe(),
        "grpc": {"grpc": {"port": answered.GRPC}},
        "tcp": {"tcpSocket": {"port": answered.TCP}},
    }
    check = {"http": {"port": CHECKED}, "target": target, **LASTING}
    with contextlib.ExitStack() as undo:
        pod = answered.add(node, kind, 5, [(handlers[kind], check)])
        undo.callback(answered.remove, node, kind)
        server = undo.enter_context(answered.serving(pod))
        kubelet = undo.enter_context(answered.kubelet(node, pod))
        probe = {"http": kubelet.probe, "grpc": kubelet.grpc, "tcp": kubelet.tcp}[kind]
        polling.wait_until("the probe is answered", lambda: probe() == HEALTHY)
        for is_healthy, expected in ((False, SICK), (True, HEALTHY)):
            server.is_healthy = is_healthy
            results: list[str] = []

            def has_changed(results: list[str] = results, expected: str = expected) -> bool:
                results.append(probe())
                return results[-5:] == [expected] * 5

            polling.wait_until(f"answers are {expected}", has_changed)
            assert results == sorted(results, reverse=expected == HEALTHY)

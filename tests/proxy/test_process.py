"""The process: fed by the API alone; what it leaves in the kernel, and who takes over."""

import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.proxy import nft_scripts
from bpf import pins
from bpf.services import links as service_links
from tests.kernel import cgroups, offers, traffic
from tests.proxy import scene
from tests.proxy.feeding import Process, ServedEndpoints, wait_until
from tests.proxy.scene import cluster_ip, request

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path


@pytest.fixture
def served(directory: pathlib.Path) -> Iterator[ServedEndpoints]:
    made = ServedEndpoints(directory)
    yield made
    made.close()


@pytest.fixture(params=["ebpf", "nft", "iptables"])
def process(
    request: pytest.FixtureRequest,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    directory: pathlib.Path,
    served: ServedEndpoints,
    shared_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
) -> Iterator[Process]:
    """Running, with service 0 at the first two pods."""
    offers.need_netns_cookie()
    served.put(0, pods[:2], type="NodePort", ports=[PORT])
    where = ("--run-directory", str(directory), "--bpffs", str(shared_pins.bpffs))
    made = Process(
        directory,
        *("--backend", request.param, "--target", served.target),
        *("--cgroup", str(own_cgroup.directory), *where),
    )
    with scene.routed():
        try:
            made.start()
            yield made
            assert "services_not_applied" not in made.log.read_text()
        finally:
            made.stop(signal.SIGKILL)
            clean_up(request.param, *where)


PORT = {"protocol": "TCP", "port": scene.SERVICE_PORT, "nodePort": scene.NODE_PORT}


def clean_up(backend: str, *where: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "agent", "proxy", "--backend", backend, "--cleanup", *where],
        check=True,
        timeout=60,
    )


def answers(address: str, port: int = scene.SERVICE_PORT) -> set[str]:
    return {request(address, port) for _ in range(40)}


@BOTH
def test_services_of_the_api_are_translated(process: Process, version: int) -> None:
    assert answers(cluster_ip(version)) == {"one", "two"}
    assert answers(traffic.NODE[version], scene.NODE_PORT) == {"one", "two"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_services_stay_without_the_process_and_the_next_one_takes_over(
    process: Process, served: ServedEndpoints, pods: list[labs.LabPod], number: signal.Signals
) -> None:
    process.stop(number)
    assert answers(cluster_ip(4)) == {"one", "two"}
    served.put(0, pods[2:])
    served.put(1, pods[:1])
    process.start()
    assert answers(cluster_ip(4)) == {"three"}
    assert answers(cluster_ip(4, 1)) == {"one"}


def test_sigterm_exits_with_status_0(process: Process) -> None:
    assert process.stop(signal.SIGTERM) == 0


@BOTH
def test_endpoint_with_failing_probes_is_avoided(
    process: Process,
    served: ServedEndpoints,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    version: int,
) -> None:
    servers.stop(pods[0])
    served.set_ready(pods[0], is_ready=False)
    wait_until(lambda: all_connections_succeed(cluster_ip(version)))
    assert answers(cluster_ip(version)) == {"two"}
    servers.start(pods[0])
    served.set_ready(pods[0], is_ready=True)
    wait_until(lambda: request(cluster_ip(version)) == "one")


def all_connections_succeed(address: str) -> bool:
    """In as many turns as make it sure, were one of two endpoints dead."""
    for _ in range(30):
        try:
            request(address)
        except ConnectionRefusedError:
            return False
    return True


def test_no_connection_fails_while_services_change(
    process: Process, served: ServedEndpoints, pods: list[labs.LabPod]
) -> None:
    """The second pod is healthy throughout, the others come and go; all of them answer."""
    stopped, failures, count = threading.Event(), [], 0

    def connect() -> None:
        nonlocal count
        while not stopped.is_set():
            try:
                request(cluster_ip(4))
                request(cluster_ip(6))
            except OSError as error:
                failures.append(repr(error))
            count += 2

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        for turn in range(40):
            served.put(0, [pods[1], *pods[turn % 2 * 2 : turn % 2 * 2 + 1]])
            served.put(1 + turn, pods[:1])
            last = 1 + turn
            wait_until(lambda: reaches(last))  # noqa: B023  it is waited for here
    finally:
        stopped.set()
        thread.join()
    assert failures == []
    assert count > 100


def reaches(number: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.1)
        try:
            return sock.connect_ex((cluster_ip(4, number), scene.SERVICE_PORT)) == 0
        except TimeoutError:
            return False


def test_second_proxy_is_rejected(
    process: Process, directory: pathlib.Path, shared_pins: pins.Pins
) -> None:
    second = subprocess.run(
        [
            *(sys.executable, "-m", "agent", "proxy", "--backend", "nft"),
            *("--run-directory", str(directory), "--bpffs", str(shared_pins.bpffs)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert "another agent is running" in second.stderr


def test_cleanup_fails_beside_a_proxy_and_removes_all_after_it(
    process: Process, directory: pathlib.Path, shared_pins: pins.Pins
) -> None:
    command = [
        *(sys.executable, "-m", "agent", "cleanup"),
        *("--run-directory", str(directory), "--bpffs", str(shared_pins.bpffs)),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert answers(cluster_ip(4)) == {"one", "two"}
    process.stop()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises((ConnectionRefusedError, TimeoutError)):
        reach_node_port()
    assert not service_links.directory(shared_pins).exists()
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    assert nft_scripts.TABLE not in listed.stdout
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True)
    assert "PODGATE-" not in saved.stdout


def reach_node_port() -> None:
    with socket.socket() as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        sock.connect((traffic.NODE[4], scene.NODE_PORT))


def test_addresses_that_the_node_gets_later_have_its_node_ports(process: Process) -> None:
    late = "198.18.0.77"
    subprocess.run(["ip", "address", "add", f"{late}/32", "dev", "lo"], check=True)

    def is_there() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex((late, scene.NODE_PORT)) == 0

    wait_until(is_there, process.log)

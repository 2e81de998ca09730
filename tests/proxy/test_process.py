"""The process: fed by the API alone; what it leaves in the kernel, and who takes over."""

import http.client
import json
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.services.proxy import nft_scripts
from bpf import pins
from bpf.services import links as service_links
from tests import unprivileged
from tests.kernel import cgroups, offers, traffic
from tests.polling import PATIENCE
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


@pytest.fixture(params=["ebpf", "nft", "iptables", "ipvs"])
def process(
    request: pytest.FixtureRequest,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    directory: pathlib.Path,
    served: ServedEndpoints,
    fresh_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
) -> Iterator[Process]:
    """Running, with service 0 at the first two pods."""
    offers.need_netns_cookie()
    if request.param == "ipvs":
        offers.need_ipvs()
    served.put(0, pods[:2], type="NodePort", ports=[PORT])
    where = ("--run-directory", str(directory), "--bpffs", str(fresh_pins.bpffs))
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


@pytest.mark.parametrize("backend", ["ebpf", "nft", "iptables"])
def test_service_proxy_name_selects_the_services_with_that_label(
    backend: str,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    directory: pathlib.Path,
    served: ServedEndpoints,
    fresh_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
) -> None:
    offers.need_netns_cookie()
    served.put(0, pods[:1])
    served.put(1, pods[1:2], labels={"service.kubernetes.io/service-proxy-name": "podgate"})
    where = ("--run-directory", str(directory), "--bpffs", str(fresh_pins.bpffs))
    named = Process(
        directory,
        *("--backend", backend, "--target", served.target, "--service-proxy-name", "podgate"),
        *("--cgroup", str(own_cgroup.directory), *where),
    )
    with scene.routed():
        try:
            named.start()
            assert answers(cluster_ip(4, 1)) == {"two"}
            assert not reaches(0)
        finally:
            named.stop(signal.SIGKILL)
            clean_up(backend, *where)


PORT = {"protocol": "TCP", "port": scene.SERVICE_PORT, "nodePort": scene.NODE_PORT}


def clean_up(backend: str, *where: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "agent", "proxy", "--backend", backend, "--cleanup", *where],
        check=True,
        timeout=60,
    )


def get(path: str, port: int) -> tuple[int, str]:
    """Status and body of a response of the process."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def series(name: str) -> float:
    """The value of a series without labels."""
    (found,) = re.findall(rf"^{name} (\S+)$", get("/metrics", 10249)[1], re.MULTILINE)
    return float(found)


def test_metrics_and_health_are_at_kube_proxy_s_ports(
    process: Process, served: ServedEndpoints, pods: list[labs.LabPod]
) -> None:
    before = series("podgate_proxy_revision")
    count = series("kubeproxy_sync_proxy_rules_duration_seconds_count")
    assert count >= 1
    served.put(1, pods[:1])
    wait_until(lambda: series("podgate_proxy_revision") > before, process.log)
    assert series("kubeproxy_sync_proxy_rules_duration_seconds_count") > count
    assert series("podgate_proxy_services") == 2
    assert series("podgate_proxy_service_changes_total") >= 2
    assert 'podgate_proxy_frontend_changes_total{change="changed"}' in get("/metrics", 10249)[1]
    for path in ("/healthz", "/livez"):
        status, body = get(path, 10256)
        assert (status, json.loads(body)["healthy"]) == (200, True)
    assert 'kubeproxy_proxy_livez_total{code="200"} 1.0' in get("/metrics", 10249)[1]


def test_health_check_node_port_reports_whether_this_node_has_endpoints(
    process: Process, served: ServedEndpoints, pods: list[labs.LabPod]
) -> None:
    port = 32000

    def serve(*ready: labs.LabPod) -> None:
        served.put(
            2, ready, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=port
        )

    def endpoint_count() -> int:
        try:
            status, body = get("/", port)
        except ConnectionRefusedError:
            return -1
        count = json.loads(body)["localEndpoints"]
        assert status == (200 if count else 503)
        assert isinstance(count, int)
        return count

    serve(*pods[:2])
    wait_until(lambda: endpoint_count() == 2, process.log)
    serve()
    wait_until(lambda: endpoint_count() == 0, process.log)


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
    process: Process, directory: pathlib.Path, fresh_pins: pins.Pins
) -> None:
    second = subprocess.run(
        [
            *(sys.executable, "-m", "agent", "proxy", "--backend", "nft"),
            *("--run-directory", str(directory), "--bpffs", str(fresh_pins.bpffs)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert "another agent is running" in second.stderr


def test_cleanup_fails_beside_a_proxy_and_removes_all_after_it(
    process: Process, directory: pathlib.Path, fresh_pins: pins.Pins
) -> None:
    command = [
        *(sys.executable, "-m", "agent", "cleanup"),
        *("--run-directory", str(directory), "--bpffs", str(fresh_pins.bpffs)),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert answers(cluster_ip(4)) == {"one", "two"}
    process.stop()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises((ConnectionRefusedError, TimeoutError)):
        reach_node_port()
    assert not service_links.directory(fresh_pins).exists()
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


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """The soft limit of containers, which processes that are started now inherit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


CONNECT = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for number in range(3000):
    try:
        held.append(socket.create_connection(("127.0.0.1", 10256), 1))
    except OSError:
        break
ready(len(held))
"""


@pytest.mark.parametrize("process", ["nft"], indirect=True)
def test_connections_to_the_health_port_delay_no_change_of_services(
    few_descriptors: None, process: Process, served: ServedEndpoints, pods: list[labs.LabPod]
) -> None:
    with unprivileged.running(CONNECT):
        served.put(0, pods[2:])
        wait_until(lambda: answers(cluster_ip(4)) == {"three"}, process.log)
        # Root's, as the kubelet's is.
        assert get("/healthz", 10256)[0] == 200
    assert "Traceback" not in process.log.read_text()


def test_rules_that_another_program_flushes_are_back_within_a_second(
    request: pytest.FixtureRequest, process: Process
) -> None:
    """As a firewall's reload does."""
    wait_until(lambda: reaches(0))
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    flushed_at = time.monotonic()
    wait_until(lambda: reaches(0))
    assert time.monotonic() - flushed_at < 1.0 * PATIENCE**2
    if "ebpf" not in request.node.name:
        wait_until(lambda: "services_restored" in process.log.read_text())

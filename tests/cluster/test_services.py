"""Services with a real EndpointSlice controller, and both of podgate's proxies."""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Collection, Iterator

import pytest

from agent.services.client import services
from agent.services.client.v1alpha1 import endpoints_pb2
from tests import polling
from tests.cluster import containers, proxies
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.containers import FRAGILE, FRAGILE_VOLUMES
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import IMAGE, OneNode
from tests.cluster.workloads import HTTP_PROBE, PORT, Workloads
from tests.image.node import RUN_DIRECTORY
from tests.runtime import node_cgroups

pytestmark = pytest.mark.kernel
_OTHERS = ("b", "c")
_NAMES = ("a", *_OTHERS)
_SERVICE_PORT = 80
_MANY = 2000
# As many connections: a proxy that chooses at random misses one of three endpoints in one of ten
# billion runs.
_TIMES = 60
# A busy machine takes seconds to respond.
_FETCH = """
import sys, urllib.request

def fetch(times):
    for _ in range(times):
        with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
            print(answer.read().decode(), flush=True)
"""
_LOOP = f"""{_FETCH}
import time
while True:
    try:
        fetch(1)
    except OSError:
        pass
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def endpoints(bare_cluster: OneNode, podgate: Deployment) -> Iterator[None]:
    with proxies.published_endpoints(bare_cluster, podgate):
        yield


@pytest.fixture(scope="module")
def outside() -> Iterator[str]:
    """A network namespace beyond the node's uplink; its path."""
    with proxies.outside():
        yield proxies.OUTSIDE_NETNS


@pytest.fixture(params=["ebpf", "nft"])
def backend(
    request: pytest.FixtureRequest,
    bare_cluster: OneNode,
    endpoints: None,
    outside: str,
    tmp_path: pathlib.Path,
) -> Iterator[str]:
    """A running proxy."""
    with proxies.running(bare_cluster, request.param, tmp_path) as proxy:
        yield proxy.backend


def _serve(users: Workloads) -> Json:
    """Three pods that respond with their names, and their service; the service."""
    for name in _NAMES:
        server = {**FRAGILE, "readinessProbe": HTTP_PROBE}
        *shell, script = server["command"]
        named = f"hostname > /www/name; {script}"
        server["command"] = [*shell, named]
        users.run(name, server, labels={"service": "web"}, volumes=FRAGILE_VOLUMES)
    ports = [{"port": _SERVICE_PORT, "targetPort": PORT}]
    spec = {"type": "NodePort", "selector": {"service": "web"}, "ports": ports}
    path = f"/api/v1/namespaces/{users.namespace}/services"
    made = users.api.create(path, {"metadata": {"name": "web"}, "spec": spec})
    users.until_ready(*_NAMES)
    return made


def _answers(node: OneNode, url: str, *, netns: str = "") -> set[str]:
    """The responses to a host process of the cluster's cgroup; empty if one of them is missing."""
    command = [sys.executable, "-c", f"{_FETCH}\nfetch({_TIMES})", url]
    if netns:
        command = ["nsenter", f"--net={netns}", *command]
    directory = node.kubelet.daemon.cgroup.parent / "client"
    directory.mkdir(exist_ok=True)
    command = node_cgroups.command_in(directory, command)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return set(answer.stdout.split()) if answer.returncode == 0 else set()


def _until_answered_by(
    names: Collection[str], users: Workloads, node: OneNode, url: str, *, netns: str = ""
) -> None:
    """Wait until exactly these pods respond."""
    answers: list[set[str]] = []

    def check() -> bool:
        answers.append(_answers(node, url, netns=netns))
        return answers[-1] == set(names)

    try:
        polling.wait_until(f"{names} respond", check)
    except polling.TimedOutError as error:
        raise AssertionError(f"{error}: {answers}, and the agent has {_services(users)}") from error


def test_service_reaches_its_ready_pods_from_host_and_pods(
    node: OneNode, backend: str, outside: str, namespaces: Namespaces
) -> None:
    users = namespaces()
    spec = _serve(users)["spec"]
    url = f"http://{spec['clusterIP']}:{_SERVICE_PORT}/name"
    _until_answered_by(_NAMES, users, node, url)

    client = ["/usr/bin/python3", "-uc", _LOOP, url]
    users.run("client", {"name": "client", "image": IMAGE, "command": client})
    users.until_ready("client")
    log = f"{users.pods_path}/client/log"
    polling.wait_until(
        "all pods respond to a pod", lambda: set(_NAMES) <= set(users.api.text(log).split())
    )

    from_outside = f"http://{proxies.UPLINK}:{spec['ports'][0]['nodePort']}/name"
    if backend == "nft":
        _until_answered_by(_NAMES, users, node, from_outside, netns=outside)

    containers.set_health(users.pod("a"), is_healthy=False)
    _until_answered_by(_OTHERS, users, node, url)


def _services(users: Workloads) -> dict[str, endpoints_pb2.ServiceEndpoints]:
    """Of the namespace, as a new client of the agent gets them; waits for an agent."""
    with contextlib.closing(services.ServicesClient()) as client:
        state = client.next()
    assert state is not None
    return {one.name: one for one in state.services if one.namespace == users.namespace}


def _endpoints(users: Workloads) -> int:
    """Of the service."""
    service = _services(users).get("web")
    return len(service.ports[0].endpoints) if service else 0


def _are_saved() -> bool:
    """Whether an agent that starts now has the newest state, which is saved half a second after it
    was published. A proxy that has a newer one keeps it until the API server is back."""
    saved = json.loads((RUN_DIRECTORY / "state" / "services.json").read_text())
    with contextlib.closing(services.ServicesClient()) as client:
        state = client.next()
    assert state is not None
    return bool(saved["instance_id"] == state.instance_id and saved["rev"] >= state.rev)


def test_services_go_on_without_api_server_and_agent(
    node: OneNode, podgate: Deployment, backend: str, namespaces: Namespaces
) -> None:
    """The next agent has the saved services, and takes readiness from the kubelet."""
    users = namespaces()
    spec = _serve(users)["spec"]
    url = f"http://{spec['clusterIP']}:{_SERVICE_PORT}/name"
    _until_answered_by(_NAMES, users, node, url)
    sick = users.pod("a")
    polling.wait_until("the services are saved", _are_saved)
    node.control_plane.api_server.kill()
    try:
        killed = podgate.kill_agent()
        assert _answers(node, url) == set(_NAMES)
        podgate.until("another agent", lambda report: report.pid != killed)
        polling.wait_until("it has all", lambda: _endpoints(users) == len(_NAMES))
        containers.set_health(sick, is_healthy=False)
        _until_answered_by(_OTHERS, users, node, url)
        containers.set_health(sick, is_healthy=True)
        _until_answered_by(_NAMES, users, node, url)
    finally:
        node.control_plane.api_server.start()
        node.control_plane.wait_until_ready()
    podgate.wait_until_ready()
    assert _answers(node, url) == set(_NAMES)


def test_two_thousand_services_of_a_namespace_are_read_again_by_the_next_agent(
    node: OneNode, podgate: Deployment, endpoints: None, namespaces: Namespaces
) -> None:
    users = namespaces()
    path = f"/api/v1/namespaces/{users.namespace}/services"
    spec = {"clusterIP": "None", "ports": [{"port": _SERVICE_PORT}]}

    def count() -> int:
        return len(_services(users))

    try:
        for number in range(_MANY):
            node.api.create(path, {"metadata": {"name": f"many{number}"}, "spec": spec})
        polling.wait_until("the agent has all", lambda: count() == _MANY)
        killed = podgate.kill_agent()
        podgate.until("another agent", lambda report: report.pid != killed)
        node.api.delete(f"{path}/many0")
        polling.wait_until("the next agent has one less", lambda: count() == _MANY - 1)
    finally:
        node.api.delete(path)
    polling.wait_until("none is left", lambda: count() == 0)

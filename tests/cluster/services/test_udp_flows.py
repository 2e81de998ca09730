"""Clients that send datagrams from one port while endpoints change. Titles are those of
test/e2e/network/conntrack.go."""

import pytest

from tests import polling
from tests.cluster import proxies
from tests.cluster.services import rig
from tests.cluster.services.rig import (
    OTHER_TARGET,
    PORT,
    REFUSED,
    TARGET,
    Client,
    Services,
    both,
    node_port,
    port,
)
from tests.cluster.workloads import Workloads

pytestmark = pytest.mark.kernel
_SOURCE_PORT = 12345
_UDP = port(protocol="UDP")
_CLIENTS = pytest.mark.parametrize("client", ["pod", "host"], indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.getfixturevalue(request.param)
    return found


def _until(client: Client, name: str, address: str, number: int = PORT) -> None:
    client.until([name], address, number, "udp", source_port=_SOURCE_PORT, count=3, seconds=2)


def _cycle(own: Workloads, client: Client, address: str, number: int) -> None:
    """One pod after the other serves; a client keeps its port."""
    rig.run_server(own, "first", labels={"serves": "web"})
    own.until_ready("first")
    _until(client, "first", address, number)
    rig.run_server(own, "second", labels={"serves": "web"})
    own.until_ready("second")
    own.delete("first")
    own.until_gone("first")
    _until(client, "second", address, number)


@_CLIENTS
def test_client_of_a_cluster_ip_follows_when_its_pod_is_replaced(
    own: Workloads, own_services: Services, client: Client
) -> None:
    """should be able to preserve UDP traffic when server pod cycles for a ClusterIP service; ...
    and client is hostNetwork."""
    address, _ = both(own_services.create(_UDP))
    _cycle(own, client, address, PORT)


@_CLIENTS
def test_client_of_a_node_port_follows_when_its_pod_is_replaced(
    own: Workloads, own_services: Services, client: Client
) -> None:
    """should be able to preserve UDP traffic when server pod cycles for a NodePort service."""
    service = own_services.create(_UDP, type="NodePort")
    _cycle(own, client, proxies.UPLINK, node_port(service))


def test_client_of_a_local_cluster_ip_follows_when_its_pod_is_replaced(
    own: Workloads, own_services: Services, pod: Client
) -> None:
    """should be able to preserve UDP traffic when server pod cycles for a ClusterIP service with
    InternalTrafficPolicy set to Local."""
    address, _ = both(own_services.create(_UDP, internalTrafficPolicy="Local"))
    _cycle(own, pod, address, PORT)


def test_client_from_outside_follows_when_its_pod_is_replaced(
    own: Workloads, own_services: Services, outside: Client
) -> None:
    """should be able to preserve UDP traffic when server pod cycles for a NodePort service, from
    another node."""
    service = own_services.create(_UDP, type="NodePort")
    _cycle(own, outside, proxies.UPLINK, node_port(service))


@_CLIENTS
def test_client_reaches_a_pod_that_becomes_ready_later(
    own: Workloads, own_services: Services, client: Client
) -> None:
    """should be able to preserve UDP traffic when initial unready endpoints get ready."""
    rig.run_unready(own, "late", labels={"serves": "web"})
    rig.until_started(own, "late")
    address, _ = both(own_services.create(_UDP))
    client.until_down(address, kind="udp")
    rig.set_ready(own, "late", is_ready=True)
    _until(client, "late", address)


def test_rejected_client_reaches_the_first_endpoint(
    own: Workloads, own_services: Services, pod: Client
) -> None:
    """The same: without endpoints datagrams are rejected, and leave no flow behind."""
    address, _ = both(own_services.create(_UDP))
    pod.until([REFUSED], address, kind="udp", source_port=_SOURCE_PORT)
    rig.run_server(own, "new", labels={"serves": "web"})
    own.until_ready("new")
    _until(pod, "new", address)


@_CLIENTS
def test_client_follows_when_the_target_port_changes(services: Services, client: Client) -> None:
    """should be able to cleanup conntrack entries when UDP service target port changes for a
    NodePort service."""
    service = services.create(port(protocol="UDP"), type="NodePort")
    place = (proxies.UPLINK, node_port(service))

    def targets() -> set[int]:
        answers = client.call(*place, "udp", count=3, source_port=_SOURCE_PORT)
        return {one.get("port", 0) for one in answers}

    polling.wait_until("the first port responds", lambda: targets() == {TARGET})
    (number,) = service["spec"]["ports"]
    services.patch(service, ports=[{**number, "targetPort": OTHER_TARGET}])
    polling.wait_until("the second port responds", lambda: targets() == {OTHER_TARGET})

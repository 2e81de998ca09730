"""Node ports, external IPs and load balancers' addresses. Titles are those of test/e2e/network."""

import itertools
import json
import urllib.error
import urllib.request

import pytest

from tests import polling
from tests.cluster import proxies
from tests.cluster.api import Json
from tests.cluster.services import rig
from tests.cluster.services.rig import (
    ELSEWHERE,
    PORT,
    REFUSED,
    SERVERS,
    SILENT,
    Client,
    Services,
    both,
    node_port,
    port,
)
from tests.cluster.workloads import Workloads

pytestmark = pytest.mark.kernel
NODE = (proxies.UPLINK, proxies.UPLINK_IPV6)
_LOCAL: Json = {"type": "NodePort", "externalTrafficPolicy": "Local"}
_numbers = itertools.count(1)


def _external() -> list[str]:
    """An address of each family that no interface has."""
    number = next(_numbers)
    return [f"198.18.101.{number}", f"fd00:18:101::{number}"]


def test_node_port_reaches_all_pods_at_every_address_of_the_node(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should be able to create a functioning NodePort service."""
    service = services.create(type="NodePort")
    for client in (pod, host):
        for address in (*both(service), *NODE):
            client.until(SERVERS, address, PORT if address in both(service) else node_port(service))


def test_node_port_reaches_all_pods_by_udp(services: Services, pod: Client, host: Client) -> None:
    """networking.go: should support basic nodePort: udp functionality."""
    service = services.create(port(protocol="UDP"), type="NodePort")
    for client in (pod, host):
        for address in NODE:
            client.until(SERVERS, address, node_port(service), "udp")


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_node_port_serves_clients_from_outside(
    services: Services, outside: Client, kind: str
) -> None:
    """service.go: should be able to create a functioning NodePort service (by its nodes'
    ExternalIPs)."""
    service = services.create(port(protocol=kind.upper()), type="NodePort")
    for address in NODE:
        outside.until(SERVERS, address, node_port(service), kind)


def test_cluster_ip_service_gets_one_node_port_for_two_protocols(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should be able to update service type to NodePort listening on same port number
    but different protocols."""
    service = services.create()
    host.until(SERVERS, both(service)[0])
    ports = [port(name="t"), port(name="u", protocol="UDP")]
    number = node_port(services.patch(service, type="NodePort", ports=ports))
    for one in ports:
        one["nodePort"] = number
    services.patch(service, ports=ports)
    for client in (pod, host):
        for kind in ("tcp", "udp"):
            client.until(SERVERS, NODE[0], number, kind)


def test_node_port_ends_with_the_type(services: Services, pod: Client, host: Client) -> None:
    """networking.go: should update nodePort: http, and udp."""
    service = services.create(port(name="t"), port(name="u", protocol="UDP"), type="NodePort")
    tcp, udp = (one["nodePort"] for one in service["spec"]["ports"])
    for client in (pod, host):
        client.until(SERVERS, NODE[0], tcp)
        client.until(SERVERS, NODE[0], udp, "udp")
    services.patch(service, type="ClusterIP")
    for client in (pod, host):
        client.until_down(NODE[0], tcp)
        client.until_down(NODE[0], udp, "udp")
        client.until(SERVERS, both(service)[0])


def test_external_ip_that_no_node_has_is_proxied(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should be possible to connect to a service via ExternalIP when the external IP is
    not assigned to a node."""
    external = _external()
    services.create(externalIPs=external)
    for client in (pod, host):
        for address in external:
            client.until(SERVERS, address)


def test_external_ip_serves_clients_from_outside(services: Services, outside: Client) -> None:
    """The same, for clients from outside."""
    external = _external()
    services.create(externalIPs=external)
    for address in external:
        outside.until(SERVERS, address)


def test_load_balancer_is_served_on_the_node_itself(
    services: Services, pod: Client, host: Client
) -> None:
    """loadbalancer.go: should work from pods; service.go: should serve endpoints on same port and
    different protocol for internal traffic on Type LoadBalancer."""
    balancer = _external()
    service = services.create(port(name="t"), port(name="u", protocol="UDP"), type="LoadBalancer")
    services.set_load_balancer(service, *({"ip": one} for one in balancer))
    for client in (pod, host):
        for address in (*balancer, *both(service)):
            client.until(SERVERS, address)
            client.until(SERVERS, address, kind="udp")


def test_load_balancer_of_mode_proxy_is_not_bypassed(
    services: Services, pod: Client, host: Client
) -> None:
    """KEP-1860: with ipMode Proxy traffic goes to the load balancer."""
    (address, _) = _external()
    service = services.create(type="LoadBalancer")
    services.set_load_balancer(service, {"ip": address, "ipMode": "VIP"})
    host.until(SERVERS, address)
    services.set_load_balancer(service, {"ip": address, "ipMode": "Proxy"})
    for client in (pod, host):
        client.until_down(address)
        client.until(SERVERS, both(service)[0])


def test_load_balancer_admits_its_source_ranges_only(services: Services, outside: Client) -> None:
    """loadbalancer.go: should only allow access from service loadbalancer source ranges."""
    (address, _) = _external()
    service = services.create(
        type="LoadBalancer", loadBalancerSourceRanges=[f"{proxies.OUTSIDE}/32"]
    )
    services.set_load_balancer(service, {"ip": address})
    outside.until(SERVERS, address)
    services.patch(service, loadBalancerSourceRanges=["198.18.102.0/24"])
    outside.until([SILENT], address)
    services.patch(service, loadBalancerSourceRanges=None)
    outside.until(SERVERS, address)


def _health(address: str, number: int) -> tuple[int, int] | None:
    """Status of the health check and the number of endpoints in its body; None: no response."""
    host = f"[{address}]" if ":" in address else address
    try:
        with urllib.request.urlopen(f"http://{host}:{number}/", timeout=10) as response:
            return response.status, json.load(response)["localEndpoints"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["localEndpoints"]
    except OSError:
        return None


def _until_health(address: str, number: int, expected: tuple[int, int] | None) -> None:
    what = f"the health check at {address} is {expected}"
    polling.wait_until(what, lambda: _health(address, number) == expected)


def test_health_check_node_port_counts_ready_pods_of_the_node(
    own: Workloads, own_services: Services
) -> None:
    """loadbalancer.go: should only target nodes with endpoints, by the port that the load balancer
    checks."""
    service = own_services.create(type="LoadBalancer", externalTrafficPolicy="Local")
    number = service["spec"]["healthCheckNodePort"]
    rig.run_unready(own, "late", labels={"serves": "web"})
    rig.until_started(own, "late")
    for is_ready, expected in ((None, (503, 0)), (True, (200, 1)), (False, (503, 0))):
        if is_ready is not None:
            rig.set_ready(own, "late", is_ready=is_ready)
        for address in NODE:
            _until_health(address, number, expected)
    own_services.patch(service, externalTrafficPolicy="Cluster")
    _until_health(NODE[0], number, None)


def test_load_balancer_gets_node_ports_when_it_allocates_them(
    services: Services, host: Client
) -> None:
    """loadbalancer.go: should be able to create LoadBalancer Service without NodePort and change
    it."""
    (address, _) = _external()
    service = services.create(type="LoadBalancer", allocateLoadBalancerNodePorts=False)
    services.set_load_balancer(service, {"ip": address})
    assert "nodePort" not in service["spec"]["ports"][0]
    host.until(SERVERS, address)
    changed = services.patch(service, allocateLoadBalancerNodePorts=True)
    host.until(SERVERS, NODE[0], node_port(changed))


def test_local_policy_keeps_the_address_of_a_client_from_outside(
    services: Services, outside: Client
) -> None:
    """service.go: should support externalTrafficPolicy=Local for type=NodePort; loadbalancer.go:
    should work for type=LoadBalancer with it."""
    service = services.create(**_LOCAL)
    for address, own in zip(NODE, (proxies.OUTSIDE, proxies.OUTSIDE_IPV6), strict=True):
        outside.until(SERVERS, address, node_port(service))
        answers = outside.call(address, node_port(service))
        assert {one["client"] for one in answers} == {own}
    services.patch(service, externalTrafficPolicy="Cluster")

    def is_masqueraded() -> bool:
        answers = outside.call(NODE[0], node_port(service))
        return proxies.OUTSIDE not in {one.get("client") for one in answers}

    polling.wait_until("the client's address is the node's", is_masqueraded)


def test_local_policy_drops_where_only_other_nodes_have_endpoints(
    services: Services, outside: Client, pod: Client, host: Client
) -> None:
    """loadbalancer.go: should only target nodes with endpoints. Clients of the node itself reach
    all of them."""
    service = services.create(selector={}, **_LOCAL)
    services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"))
    for client in (pod, host):
        client.until([ELSEWHERE], NODE[0], node_port(service))
    outside.until([SILENT], NODE[0], node_port(service))
    services.patch(service, externalTrafficPolicy="Cluster")
    outside.until([ELSEWHERE], NODE[0], node_port(service))


def test_node_port_without_endpoints_rejects_clients_from_outside(
    services: Services, outside: Client
) -> None:
    """service.go: should be rejected when no endpoints exist, from outside."""
    service = services.create(selector={"serves": "nothing"}, type="NodePort")
    for address in NODE:
        outside.until([REFUSED], address, node_port(service))


def test_local_policy_uses_terminating_pods_of_the_node_if_no_other_is_left(
    own: Workloads, own_services: Services, outside: Client
) -> None:
    """service.go: should fallback to local terminating endpoints when there are no ready endpoints
    with externalTrafficPolicy=Local."""
    rig.run_server(own, "ends", labels={"serves": "web"}, terminationGracePeriodSeconds=600)
    own.until_ready("ends")
    service = own_services.create(**_LOCAL)
    own_services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"))
    outside.until(["ends"], NODE[0], node_port(service))
    own.api.delete(f"{own.pods_path}/ends")
    rig.until_terminating(own_services, service)
    outside.until(["ends"], NODE[0], node_port(service))
    assert outside.names(NODE[0], node_port(service)) == {"ends"}


def test_terminating_pods_serve_node_ports_if_no_other_is_left(
    own: Workloads, own_services: Services, pod: Client, host: Client
) -> None:
    """service.go: should fallback to terminating endpoints when there are no ready endpoints with
    externalTrafficPolicy=Cluster."""
    rig.run_server(own, "ends", labels={"serves": "web"}, terminationGracePeriodSeconds=600)
    own.until_ready("ends")
    service = own_services.create(type="NodePort")
    host.until(["ends"], NODE[0], node_port(service))
    own.api.delete(f"{own.pods_path}/ends")
    rig.until_terminating(own_services, service)
    for client in (pod, host):
        client.until(["ends"], NODE[0], node_port(service))
    rig.run_server(own, "new", labels={"serves": "web"})
    for client in (pod, host):
        client.until(["new"], NODE[0], node_port(service))

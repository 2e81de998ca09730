"""Cluster IPs, for clients in pods and on the host. Titles are those of test/e2e/network."""

import contextlib

import pytest

from agent.services.client.services import ServicesClient
from tests import polling
from tests.cluster import containers, proxies
from tests.cluster.one_node import OneNode
from tests.cluster.proxies import RunningProxy
from tests.cluster.services import rig
from tests.cluster.services.rig import (
    ELSEWHERE,
    OTHER_PORT,
    OTHER_TARGET,
    PORT,
    REFUSED,
    SERVERS,
    TARGET,
    Client,
    Services,
    both,
    port,
)
from tests.cluster.workloads import Workloads

pytestmark = pytest.mark.kernel


def test_service_reaches_all_its_pods_in_both_families(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should serve a basic endpoint from pods; dual_stack.go: should function for
    pod-Service: http, and node-Service: http."""
    for address in both(services.create()):
        for client in (pod, host):
            client.until(SERVERS, address)


def test_service_reaches_all_its_pods_by_udp(services: Services, pod: Client, host: Client) -> None:
    """networking.go, dual_stack.go: should function for pod-Service: udp, and node-Service: udp."""
    for address in both(services.create(port(protocol="UDP"))):
        for client in (pod, host):
            client.until(SERVERS, address, kind="udp")


def test_pod_behind_a_service_is_a_client_as_any_other(
    services: Services, users: Workloads, dual_stack: OneNode
) -> None:
    """networking.go, dual_stack.go: should function for endpoint-Service: http, and udp."""
    client = rig.pod_client(dual_stack, users.pod("a"))
    service = services.create(port(name="tcp"), port(name="udp", protocol="UDP"))
    for address in both(service):
        client.until(SERVERS, address)
        client.until(SERVERS, address, kind="udp")


def test_each_port_of_a_service_has_its_own_target(services: Services, pod: Client) -> None:
    """service.go: should serve multiport endpoints from pods."""
    service = services.create(
        port(name="web", target="one"), port(OTHER_PORT, name="admin", target="two")
    )
    for address in both(service):
        for number, target in ((PORT, TARGET), (OTHER_PORT, OTHER_TARGET)):
            pod.until(SERVERS, address, number)
            assert {one["port"] for one in pod.call(address, number)} == {target}


def test_one_port_serves_tcp_and_udp(services: Services, pod: Client) -> None:
    """service.go: should serve endpoints on same port and different protocols."""
    service = services.create(port(name="tcp"))
    address, _ = both(service)
    pod.until(SERVERS, address)
    services.patch(service, ports=[port(name="tcp"), port(name="udp", protocol="UDP")])
    pod.until(SERVERS, address, kind="udp")
    assert pod.names(address) <= set(SERVERS)
    services.patch(service, ports=[port(name="udp", protocol="UDP")])
    pod.until_down(address)
    assert pod.names(address, kind="udp") <= set(SERVERS)


def test_named_target_port_differs_between_pods(
    own: Workloads, own_services: Services, pod: Client
) -> None:
    """service.go: should support named targetPorts that resolve to different ports on different
    endpoints."""
    for name, number in (("first", 7001), ("second", 7002)):
        rig.run_server(own, name, rig.server(number), labels={"serves": "web"})
    service = own_services.create(port(target="one"))
    own.until_ready("first", "second")
    for address in both(service):
        pod.until(["first", "second"], address)
        answers = {(one["name"], one["port"]) for one in pod.call(address)}
        assert answers == {("first", 7001), ("second", 7002)}


def test_ports_are_added_and_deleted(services: Services, pod: Client) -> None:
    """service.go: should be updated after adding or deleting ports."""
    service = services.create(port(name="web"))
    address, _ = both(service)
    pod.until(SERVERS, address)
    services.patch(service, ports=[port(name="web"), port(OTHER_PORT, name="admin")])
    pod.until(SERVERS, address, OTHER_PORT)
    services.patch(service, ports=[port(OTHER_PORT, name="admin")])
    pod.until_down(address)
    assert pod.names(address, OTHER_PORT) <= set(SERVERS)


def test_pod_sees_the_address_of_a_client_in_a_pod(
    services: Services, users: Workloads, pod: Client
) -> None:
    """service.go: should preserve source pod IP for traffic thru service cluster IP."""
    client = users.pod("client")
    for address in both(services.create()):
        pod.until(SERVERS, address)
        wanted = rig.address_of(client, 6 if ":" in address else 4)
        assert {one["client"] for one in pod.call(address)} == {wanted}


def test_pod_reaches_itself_by_its_service(
    own: Workloads, own_services: Services, dual_stack: OneNode
) -> None:
    """service.go: should allow pods to hairpin back to themselves through services."""
    rig.run_server(own, "hairpin", labels={"serves": "web"})
    (made,) = own.until_ready("hairpin")
    client = rig.pod_client(dual_stack, made)
    for address in both(own_services.create(port(name="t"), port(name="u", protocol="UDP"))):
        for kind in ("tcp", "udp"):
            client.until(["hairpin"], address, kind=kind)


def test_deleted_service_ends_and_others_go_on(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should be able to up and down services."""
    deleted, left = services.create(), services.create()
    for client in (pod, host):
        client.until(SERVERS, both(deleted)[0])
        client.until(SERVERS, both(left)[0])
    services.delete(deleted)
    added = services.create()
    for client in (pod, host):
        client.until(SERVERS, both(added)[0])
        for address in both(deleted):
            client.until_down(address)
        assert client.names(both(left)[0]) <= set(SERVERS)


def test_recreated_service_has_another_address(services: Services, pod: Client) -> None:
    """service.go: should work after the service has been recreated."""
    service = services.create(name="recreated")
    before = both(service)
    pod.until(SERVERS, before[0])
    services.delete(service)
    # The allocator may hand out the same address again.
    holder = services.create(clusterIP=before[0], clusterIPs=before)
    after = both(services.create(name="recreated"))
    assert set(after).isdisjoint(before)
    for address in after:
        pod.until(SERVERS, address)
    services.delete(holder)
    assert pod.names(after[0]) <= set(SERVERS)


def test_service_without_endpoints_rejects(services: Services, pod: Client, host: Client) -> None:
    """service.go: should be rejected when no endpoints exist."""
    service = services.create(
        port(name="t"), port(name="u", protocol="UDP"), selector={"serves": "nothing"}
    )
    for address in both(service):
        pod.until([REFUSED], address)
        host.until([REFUSED], address)
        pod.until([REFUSED], address, kind="udp")


def test_failed_pod_is_no_endpoint_even_if_unready_ones_are(
    own: Workloads, own_services: Services, pod: Client, dual_stack: OneNode
) -> None:
    """service.go: should be rejected for evicted pods (no endpoints exist). This pod fails when its
    server is killed, since the test's disk has no quota to exceed."""
    service = own_services.create(publishNotReadyAddresses=True)
    rig.run_server(own, "ended", labels={"serves": "web"}, restartPolicy="Never")
    pod.until(["ended"], both(service)[0])
    containers.kill_container(dual_stack.runtime, own.pod("ended"))
    polling.wait_until("it has failed", lambda: own.pod("ended")["status"]["phase"] == "Failed")
    # The controller reads pods again when their readiness changes, which came before the end.
    own_services.patch(service, labels={"changed": "yes"})
    rig.until_empty(own_services, service)
    for address in both(service):
        pod.until([REFUSED], address)


def test_services_with_one_selector_are_independent(services: Services, pod: Client) -> None:
    """networking.go: should function for multiple endpoint-Services with same selector."""
    one, two = services.create(), services.create(port(target="two"))
    pod.until(SERVERS, both(one)[0])
    pod.until(SERVERS, both(two)[0])
    services.delete(one)
    pod.until_down(both(one)[0])
    assert pod.names(both(two)[0]) <= set(SERVERS)


def test_deleted_pod_is_left_out(own: Workloads, own_services: Services, pod: Client) -> None:
    """networking.go, dual_stack.go: should update endpoints: http, and udp."""
    for name in ("stays", "goes"):
        rig.run_server(own, name, labels={"serves": "web"})
    own.until_ready("stays", "goes")
    service = own_services.create(port(name="t"), port(name="u", protocol="UDP"))
    for address in both(service):
        for kind in ("tcp", "udp"):
            pod.until(["stays", "goes"], address, kind=kind)
    own.delete("goes")
    for address in both(service):
        for kind in ("tcp", "udp"):
            pod.until(["stays"], address, kind=kind)


def test_large_requests_arrive(services: Services, pod: Client) -> None:
    """networking.go, dual_stack.go: should be able to handle large requests: http, and udp."""
    service = services.create(port(name="t"), port(name="u", protocol="UDP"))
    for address in both(service):
        for kind, size in (("tcp", 2_000_000), ("udp", 8000)):
            pod.until(SERVERS, address, kind=kind)
            answers = pod.call(address, kind=kind, size=size, count=3)
            assert {one["bytes"] for one in answers} == {size}


def test_pods_of_the_host_network_are_endpoints(
    own: Workloads, own_services: Services, pod: Client, host: Client
) -> None:
    """networking.go, dual_stack.go: should function for service endpoints using hostNetwork."""
    rig.run_on_host(own, "on-host", 7100)
    for address in both(own_services.create(port(target=7100))):
        for client in (pod, host):
            client.until(["on-host"], address)


def test_sidecar_serves_by_number_and_name(
    own: Workloads, own_services: Services, pod: Client
) -> None:
    """service.go: should connect to the ports, and the named ports, exposed by restartable init
    containers."""
    sidecar = rig.server(name="sidecar", restartPolicy="Always")
    sleeper = {**rig.server(7200), "name": "main"}
    rig.run_server(own, "with-sidecar", sleeper, labels={"serves": "web"}, initContainers=[sidecar])
    own.until_ready("with-sidecar")
    service = own_services.create(port(name="number"), port(OTHER_PORT, name="named", target="two"))
    for number, target in ((PORT, TARGET), (OTHER_PORT, OTHER_TARGET)):
        pod.until(["with-sidecar"], both(service)[0], number)
        assert {one["port"] for one in pod.call(both(service)[0], number)} == {target}


def test_services_go_on_while_the_proxy_restarts(
    services: Services, pod: Client, proxy: RunningProxy
) -> None:
    """service.go: should work after restarting kube-proxy."""
    before = services.create()
    pod.until(SERVERS, both(before)[0])
    proxy.daemon.kill()
    after = services.create()
    assert pod.names(both(before)[0]) <= set(SERVERS)
    proxy.start()
    pod.until(SERVERS, both(after)[0])
    assert pod.names(both(before)[0]) <= set(SERVERS)


def test_services_go_on_while_the_api_server_restarts(
    services: Services, pod: Client, dual_stack: OneNode
) -> None:
    """service.go: should work after restarting apiserver."""
    before = services.create()
    pod.until(SERVERS, both(before)[0])
    plane = dual_stack.control_plane
    plane.api_server.kill()
    try:
        assert pod.names(both(before)[0]) <= set(SERVERS)
    finally:
        plane.api_server.start()
        plane.wait_until_ready()
    # Controllers list again late.
    pod.until(SERVERS, both(services.create())[0], patience=180)
    assert pod.names(both(before)[0]) <= set(SERVERS)


@pytest.mark.parametrize("family", [4, 6])
def test_service_of_one_family_has_one_address(
    services: Services, pod: Client, host: Client, family: int
) -> None:
    """dual_stack.go: should create service with ipv4 cluster ip, and with ipv6 cluster ip."""
    service = services.create(ipFamilyPolicy="SingleStack", ipFamilies=[f"IPv{family}"])
    (address,) = both(service)
    assert (":" in address) == (family == 6)
    for client in (pod, host):
        client.until(SERVERS, address)


@pytest.mark.parametrize("families", [["IPv4", "IPv6"], ["IPv6", "IPv4"]])
def test_service_of_both_families_has_them_in_its_order(
    services: Services, pod: Client, families: list[str]
) -> None:
    """dual_stack.go: should create service with ipv4,v6 cluster ip, and with ipv6,v4."""
    addresses = both(services.create(ipFamilies=families))
    assert [":" in address for address in addresses] == [one == "IPv6" for one in families]
    for address in addresses:
        pod.until(SERVERS, address)


def test_family_is_added_and_taken_from_a_service(services: Services, pod: Client) -> None:
    """dual_stack.go: should create a single stack service with cluster ip from primary service
    range; test/integration/dualstack: TestUpgradeService and TestDowngradeService."""
    service = services.create(ipFamilyPolicy="SingleStack")
    (first,) = both(service)
    assert ":" not in first
    pod.until(SERVERS, first)
    second = both(services.patch(service, ipFamilyPolicy="PreferDualStack"))[1]
    pod.until(SERVERS, second)
    services.patch(service, ipFamilyPolicy="SingleStack")
    pod.until_down(second)
    assert pod.names(first) <= set(SERVERS)


def test_slices_without_a_selector_are_joined(
    services: Services, users: Workloads, pod: Client
) -> None:
    """endpointslice.go: should support a Service with multiple endpoint IPs, and with multiple
    ports, specified in multiple EndpointSlices."""
    service = services.create(port(name="t"), port(OTHER_PORT, name="o"), selector={})
    a, b = (rig.address_of(users.pod(name)) for name in ("a", "b"))
    tcp = {"name": "t", "protocol": "TCP", "port": TARGET}
    other = {"name": "o", "protocol": "TCP", "port": OTHER_TARGET}
    services.add_slice(service, rig.endpoint(a), ports=[tcp])
    services.add_slice(service, rig.endpoint(b), ports=[tcp])
    services.add_slice(service, rig.endpoint(proxies.OUTSIDE), ports=[other])
    address, ipv6 = both(service)
    pod.until(["a", "b"], address)
    pod.until([ELSEWHERE], address, OTHER_PORT)
    pod.until([REFUSED], ipv6)
    services.add_slice(service, rig.endpoint(rig.address_of(users.pod("c"), 6)), ports=[tcp])
    pod.until(["c"], ipv6)


def test_endpoints_objects_are_mirrored(services: Services, users: Workloads, pod: Client) -> None:
    """endpointslicemirroring.go: should mirror a custom Endpoints resource through create update
    and delete."""
    service = services.create(selector={}, ipFamilyPolicy="SingleStack")
    path = f"/api/v1/namespaces/{users.namespace}/endpoints"
    name = service["metadata"]["name"]

    def subsets(pod_name: str) -> list[dict[str, object]]:
        address = rig.address_of(users.pod(pod_name))
        return [{"addresses": [{"ip": address}], "ports": [{"port": TARGET}]}]

    users.api.create(path, {"metadata": {"name": name}, "subsets": subsets("a")})
    pod.until(["a"], both(service)[0])
    users.api.patch(f"{path}/{name}", {"subsets": subsets("b")})
    pod.until(["b"], both(service)[0])
    users.api.delete(f"{path}/{name}")
    pod.until([REFUSED], both(service)[0])


def test_slice_labelled_headless_is_not_used_for_a_cluster_ip(
    services: Services, users: Workloads, pod: Client
) -> None:
    """service.go: should implement service.kubernetes.io/headless."""
    service = services.create(selector={})
    path = services.add_slice(service, rig.endpoint(rig.address_of(users.pod("a"))))
    pod.until(["a"], both(service)[0])
    label = {"service.kubernetes.io/headless": ""}
    users.api.patch(path, {"metadata": {"labels": label}})
    pod.until([REFUSED], both(service)[0])


def test_headless_service_is_published_with_its_ready_pods(
    own: Workloads, own_services: Services
) -> None:
    """dns.go: should provide DNS for services; should provide DNS for pods for Hostname. A DNS
    server of the node gets these addresses and names."""
    service = own_services.create(clusterIP="None")
    name = own.namespace, service["metadata"]["name"]
    rig.run_server(own, "one", labels={"serves": "web"}, hostname="one", subdomain=name[1])
    rig.run_unready(own, "late", labels={"serves": "web"})
    rig.until_started(own, "late")
    own.until_ready("one")
    expected = {(rig.address_of(own.pod("one"), family), "one") for family in (4, 6)}

    def published() -> set[tuple[str, str]]:
        with contextlib.closing(ServicesClient()) as client:
            state = client.once()
        found = state.by_name().get(name)
        if found is None or not found.is_headless:
            return set()
        return {(each.address, each.hostname) for one in found.ports for each in one.endpoints}

    polling.wait_until("the ready pod is published", lambda: published() == expected)
    rig.set_ready(own, "late", is_ready=True)
    expected |= {(rig.address_of(own.pod("late"), family), "") for family in (4, 6)}
    polling.wait_until("both pods are published", lambda: published() == expected)


def test_service_of_another_proxy_is_left_to_it(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should implement service.kubernetes.io/service-proxy-name."""
    label = "service.kubernetes.io/service-proxy-name"
    disabled = services.create(labels={label: "foo-bar"})
    toggled = services.create()

    for client in (pod, host):
        client.until(SERVERS, both(toggled)[0])
        client.until_down(both(disabled)[0])
    services.patch(toggled, labels={label: "foo-bar"})
    for client in (pod, host):
        for address in both(toggled):
            client.until_down(address)
    services.patch(toggled, labels={label: None})
    for client in (pod, host):
        client.until(SERVERS, both(toggled)[0])
        client.until_down(both(disabled)[0])


def test_unready_pods_are_reached_where_the_service_publishes_them(
    own: Workloads, own_services: Services, pod: Client
) -> None:
    """service.go: should create endpoints for unready pods."""
    published = own_services.create(publishNotReadyAddresses=True)
    usual = own_services.create()
    rig.run_unready(own, "unready", labels={"serves": "web"})
    rig.until_started(own, "unready")
    for address in both(published):
        pod.until(["unready"], address)
    for address in both(usual):
        pod.until([REFUSED], address)


@pytest.mark.parametrize("is_published", [True, False], ids=["published", "usual"])
def test_terminating_unready_pod_is_reached_only_where_it_is_published(
    own: Workloads, own_services: Services, pod: Client, is_published: bool
) -> None:
    """service.go: should be able to connect to terminating and unready endpoints if
    PublishNotReadyAddresses is true; should not be able to ... if it is false."""
    service = own_services.create(publishNotReadyAddresses=is_published)
    rig.run_unready(own, "ends", labels={"serves": "web"}, terminationGracePeriodSeconds=600)
    rig.until_started(own, "ends")
    address, _ = both(service)
    pod.until(["ends"] if is_published else [REFUSED], address)
    own.api.delete(f"{own.pods_path}/ends")
    rig.until_terminating(own_services, service)
    pod.until(["ends"] if is_published else [REFUSED], address)


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort"])
def test_external_name_becomes_a_proxied_service(
    services: Services, pod: Client, host: Client, kind: str
) -> None:
    """service.go: should be able to change the type from ExternalName to ClusterIP, and to
    NodePort."""
    service = services.create(type="ExternalName", externalName="foo.example.com")
    changed = services.patch(service, type=kind, externalName=None, ports=[port()])
    for client in (pod, host):
        client.until(SERVERS, both(changed)[0])
    if kind == "NodePort":
        host.until(SERVERS, proxies.UPLINK, rig.node_port(changed))


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort"])
def test_proxied_service_becomes_an_external_name(
    services: Services, pod: Client, host: Client, kind: str
) -> None:
    """service.go: should be able to change the type from ClusterIP, and from NodePort, to
    ExternalName."""
    service = services.create(type=kind)
    addresses = [(address, PORT) for address in both(service)]
    if kind == "NodePort":
        addresses.append((proxies.UPLINK, rig.node_port(service)))
    for client in (pod, host):
        for place in addresses:
            client.until(SERVERS, *place)
    services.patch(
        service,
        type="ExternalName",
        externalName="foo.example.com",
        clusterIP=None,
        clusterIPs=None,
        ipFamilies=None,
        ipFamilyPolicy=None,
        ports=[],
    )
    for client in (pod, host):
        for place in addresses:
            client.until_down(*place)

"""Session affinity, internal traffic policy, terminating pods, and hints. Titles are those of
test/e2e/network."""

import time

import pytest

from tests import polling
from tests.cluster import proxies
from tests.cluster.api import Json
from tests.cluster.one_node import NAME, OneNode
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
KINDS = pytest.mark.parametrize("type_", ["ClusterIP", "NodePort"])
_ZONE = "topology.kubernetes.io/zone"
_LOCAL: Json = {"internalTrafficPolicy": "Local"}


def _affine(seconds: int = 10800) -> Json:
    config = {"clientIP": {"timeoutSeconds": seconds}}
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}


def _places(service: Json) -> list[tuple[str, int]]:
    """Where a service is reached: at its node port, if it has one."""
    if service["spec"]["type"] == "NodePort":
        return [(address, node_port(service)) for address in (proxies.UPLINK, proxies.UPLINK_IPV6)]
    return [(address, PORT) for address in both(service)]


@KINDS
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_client_with_affinity_stays_with_one_pod(
    services: Services, pod: Client, host: Client, type_: str, kind: str
) -> None:
    """service.go: should have session affinity work for service with type clusterIP, and for
    NodePort service; networking.go: should function for client IP based session affinity: http,
    and udp."""
    service = services.create(port(protocol=kind.upper()), type=type_, **_affine())
    for client in (pod, host):
        for place in _places(service):
            first = client.until_constant(*place, kind)
            assert client.names(*place, kind) == {first}


@KINDS
def test_affinity_is_switched_on_and_off(
    services: Services, pod: Client, host: Client, type_: str
) -> None:
    """service.go: should be able to switch session affinity for service with type clusterIP, and
    for NodePort service."""
    service = services.create(type=type_)
    place, _ = _places(service)
    for client in (pod, host):
        client.until(SERVERS, *place)
    services.patch(service, **_affine())
    for client in (pod, host):
        client.until_constant(*place)
    services.patch(service, sessionAffinity="None", sessionAffinityConfig=None)
    for client in (pod, host):
        client.until(SERVERS, *place)


@KINDS
def test_affinity_ends_with_its_timeout(services: Services, pod: Client, type_: str) -> None:
    """service.go: should have session affinity timeout work for service with type clusterIP, and
    for NodePort service."""
    service = services.create(type=type_, **_affine(1))
    place, _ = _places(service)
    first = pod.until_constant(*place)

    def is_another() -> bool:
        time.sleep(1.1)
        return pod.names(*place, count=1) <= set(SERVERS) - {first}

    polling.wait_until("another pod responds after the timeout", is_another)


def test_affinity_ends_with_its_pod(own: Workloads, own_services: Services, pod: Client) -> None:
    """service.go: should have session affinity work for service with type clusterIP, whose pod
    ends."""
    for name in ("first", "second"):
        rig.run_server(own, name, labels={"serves": "web"})
    own.until_ready("first", "second")
    address, _ = both(own_services.create(**_affine()))
    chosen = pod.until_constant(address)
    own.delete(chosen)
    pod.until({"first", "second"} - {chosen}, address)


def test_internal_policy_local_uses_pods_of_the_node_only(
    services: Services, pod: Client, host: Client
) -> None:
    """service.go: should respect internalTrafficPolicy=Local Pod to Pod, and Pod (hostNetwork:
    true) to Pod."""
    service = services.create(**_LOCAL)
    services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"))
    for client in (pod, host):
        client.until(SERVERS, both(service)[0])
    services.patch(service, internalTrafficPolicy="Cluster")
    for client in (pod, host):
        client.until([*SERVERS, ELSEWHERE], both(service)[0])


def test_internal_policy_local_uses_pods_of_the_host_network(
    own: Workloads, own_services: Services, pod: Client, host: Client
) -> None:
    """service.go: should respect internalTrafficPolicy=Local Pod and Node, to Pod (hostNetwork:
    true)."""
    rig.run_on_host(own, "on-host", 7300)
    service = own_services.create(port(target=7300), **_LOCAL)
    ports = [{"name": "", "protocol": "TCP", "port": rig.TARGET}]
    own_services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"), ports=ports)
    for client in (pod, host):
        client.until(["on-host"], both(service)[0])


def test_internal_policy_local_without_pods_of_the_node_reaches_none(
    services: Services, pod: Client, host: Client, proxy: proxies.RunningProxy
) -> None:
    """service.go: should respect internalTrafficPolicy=Local Pod to Pod, on a node without one. A
    socket hook cannot drop as kube-proxy does: it rejects."""
    service = services.create(selector={}, **_LOCAL)
    services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"))
    expected = SILENT if proxy.backend == "nft" else REFUSED
    pod.until([expected], both(service)[0])
    host.until_down(both(service)[0])
    services.patch(service, internalTrafficPolicy="Cluster")
    for client in (pod, host):
        client.until([ELSEWHERE], both(service)[0])


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_terminating_pods_serve_if_no_other_is_left(
    own: Workloads, own_services: Services, pod: Client, host: Client, policy: str
) -> None:
    """service.go: should fallback to terminating endpoints when there are no ready endpoints with
    internalTrafficPolicy=Cluster; should fallback to local terminating endpoints ... with
    internalTrafficPolicy=Local."""
    rig.run_server(own, "ends", labels={"serves": "web"}, terminationGracePeriodSeconds=600)
    own.until_ready("ends")
    service = own_services.create(internalTrafficPolicy=policy)
    address, _ = both(service)
    pod.until(["ends"], address)
    own.api.delete(f"{own.pods_path}/ends")
    rig.until_terminating(own_services, service)
    for client in (pod, host):
        client.until(["ends"], address)
    path = own_services.add_slice(service, rig.endpoint(proxies.OUTSIDE, node="another"))
    for client in (pod, host):
        client.until([ELSEWHERE] if policy == "Cluster" else ["ends"], address)
    own.api.delete(path)
    rig.run_server(own, "new", labels={"serves": "web"})
    for client in (pod, host):
        client.until(["new"], address)


def test_pods_of_the_same_node_are_preferred(
    services: Services, pod: Client, host: Client, users: Workloads
) -> None:
    """traffic_distribution.go: should route traffic to an endpoint on the same node when using
    PreferSameNode and fall back when the endpoint becomes unavailable."""
    service = services.create(trafficDistribution="PreferSameNode", selector={})
    near = rig.endpoint(rig.address_of(users.pod("a")), zone="z1", hints=_hints("forNodes", NAME))
    far = rig.endpoint(proxies.OUTSIDE, node="another", hints=_hints("forNodes", "another"))
    path = services.add_slice(service, near, far)
    for client in (pod, host):
        client.until(["a"], both(service)[0])
    near["conditions"]["ready"] = False
    users.api.patch(path, {"endpoints": [near, far]})
    for client in (pod, host):
        client.until([ELSEWHERE], both(service)[0])


def test_endpoints_of_the_same_zone_are_preferred(
    services: Services, pod: Client, users: Workloads, dual_stack: OneNode
) -> None:
    """traffic_distribution.go: should route traffic to an endpoint in the same zone when using
    PreferSameZone; topology_hints.go."""
    service = services.create(trafficDistribution="PreferSameZone", selector={})
    near = rig.endpoint(rig.address_of(users.pod("a")), hints=_hints("forZones", "z1"))
    far = rig.endpoint(proxies.OUTSIDE, node="another", hints=_hints("forZones", "z2"))
    services.add_slice(service, near, far)
    pod.until(["a", ELSEWHERE], both(service)[0])
    dual_stack.label(_ZONE, "z1")
    try:
        pod.until(["a"], both(service)[0])
    finally:
        dual_stack.label(_ZONE, None)
    pod.until(["a", ELSEWHERE], both(service)[0])


def test_the_controllers_hints_keep_traffic_on_the_node(services: Services, pod: Client) -> None:
    """traffic_distribution.go: should route traffic to an endpoint on the same node or fall back to
    same zone when using PreferSameNode."""
    service = services.create(trafficDistribution="PreferSameNode")

    def has_hints() -> bool:
        found = services.endpoints(service)
        return bool(found) and all(
            one.get("hints", {}).get("forNodes") == [{"name": NAME}] for one in found
        )

    polling.wait_until("the controller has written hints", has_hints)
    for address in both(service):
        pod.until(SERVERS, address)


def _hints(kind: str, name: str) -> Json:
    return {kind: [{"name": name}]}

"""Each mode beside the network plugin: who reaches a pod, and what its probes find."""

import contextlib
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.workloads import PORT, Workloads
from tests.networks import traffic, workload
from tests.networks.network import Network
from tests.networks.workload import SERVICE_IPV4, SERVICE_IPV6, SERVICE_PORT

pytestmark = pytest.mark.kernel

MODES = ("audit", "enforce", "strict")
_HEALTHY_SECONDS = 10.0


@pytest.fixture(params=MODES)
def users(request: pytest.FixtureRequest, namespaces: Namespaces) -> Workloads:
    return namespaces(request.param)


@pytest.fixture
def pods(users: Workloads) -> dict[str, Json]:
    return workload.run(users)


@pytest.fixture
def service(network: Network, users: Workloads, pods: dict[str, Json]) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        undo.enter_context(workload.service(network, users, pods["web"]))
        yield


@pytest.mark.usefixtures("service")
def test_node_reaches_pods_in_audit_only(
    network: Network, users: Workloads, pods: dict[str, Json]
) -> None:
    is_open = users.mode == "audit"
    for pod in (pods["web"], pods["tcp"]):
        assert len(traffic.addresses(pod)) == network.families
        for address in traffic.addresses(pod):
            assert (traffic.dial(address) == "") is is_open, address
    # By a service's address: EPERM where it is translated before podgate's hook.
    services = [SERVICE_IPV4]
    if network.families == 2 and not network.translates:
        services.append(SERVICE_IPV6)
    for address in services:
        assert (traffic.dial_as_node(network.cgroup, address, SERVICE_PORT) == "") is is_open


@pytest.mark.usefixtures("service")
def test_pods_and_clients_outside_reach_pods(users: Workloads, pods: dict[str, Json]) -> None:
    client = traffic.netns_of(pods["client"])
    for name in ("web", "tcp"):
        for address in traffic.addresses(pods[name]):
            assert traffic.dial(address, PORT, client) == "", address
    assert traffic.dial(SERVICE_IPV4, SERVICE_PORT, client) == ""
    assert traffic.dial(pods["web"]["status"]["podIP"], PORT, traffic.outside()) == ""


def test_probes_find_what_is_true(users: Workloads, pods: dict[str, Json]) -> None:
    assert traffic.holds_for(_HEALTHY_SECONDS, lambda: workload.harm(users)) == ""
    polling.wait_until("the sick pod's probe fails", lambda: "404" in str(users.unhealthy()))


def test_network_policies_hold(users: Workloads, pods: dict[str, Json]) -> None:
    """A default deny of ingress, then a client that is admitted to one pod. Probes pass by
    the network plugin's own exception for the node."""
    path = f"/apis/networking.k8s.io/v1/namespaces/{users.namespace}/networkpolicies"
    client = traffic.netns_of(pods["client"])

    def create(name: str, spec: Json) -> None:
        users.api.create(path, {"metadata": {"name": name}, "spec": spec})

    def reached() -> set[str]:
        return {
            name
            for name in ("web", "tcp")
            if traffic.dial(pods[name]["status"]["podIP"], PORT, client) == ""
        }

    create("deny", {"podSelector": {}, "policyTypes": ["Ingress"]})
    try:
        polling.wait_until("the deny", lambda: reached() == set())
        create(
            "admit",
            {
                "podSelector": {"matchLabels": {"app": "web"}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}],
            },
        )
        polling.wait_until("the admission", lambda: reached() == {"web"})
        assert traffic.holds_for(_HEALTHY_SECONDS, lambda: workload.harm(users)) == ""
    finally:
        users.api.delete(path)
    polling.wait_until("no policy", lambda: reached() == {"web", "tcp"})

"""A wildcard HostEndpoint, as autoHostEndpoints makes it, with an egress policy that admits pods
and the node: it does not know the relay's interface."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from agent.admin.report import PodStatus
from agent.lab.lab import NODE_IPV4, NODE_IPV6
from agent.settings import DEFAULT_RELAY_RANGES
from tests import polling
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import NAME
from tests.cluster.workloads import ISOLATION_READY
from tests.networks import traffic, workload
from tests.networks.calico import Calico, DataPlane

pytestmark = pytest.mark.kernel

_NODE_AND_PODS = (
    *("198.18.0.0/15", "fd00:18::/32"),
    *("127.0.0.0/8", "::1/128", "fe80::/10"),
)
_HEALTHY_SECONDS = 15.0


@contextlib.contextmanager
def host_endpoint(calico: Calico, *networks: str) -> Iterator[None]:
    """Of all interfaces of the node; it may open connections to these networks."""
    calico.create(
        "globalnetworkpolicies",
        "default.host",
        tier="default",
        order=10,
        selector=f"hep == '{NAME}'",
        types=["Ingress", "Egress"],
        ingress=[{"action": "Allow"}],
        egress=[{"action": "Allow", "destination": {"nets": list(networks)}}],
    )
    calico.create(
        "hostendpoints",
        f"{NAME}-auto",
        labels={"hep": NAME},
        node=NAME,
        interfaceName="*",
        expectedIPs=[str(NODE_IPV4), str(NODE_IPV6)],
    )
    try:
        yield
    finally:
        calico.delete("hostendpoints", f"{NAME}-auto")
        calico.delete("globalnetworkpolicies", "default.host")


def isolation(podgate: Deployment, namespace: str) -> dict[str, str]:
    """Reason and message of each pod's condition."""
    report = podgate.report()
    pods: list[PodStatus] = report.pods if report else []
    return {
        pod.name: f"{one.reason}: {one.message}"
        for pod in pods
        if pod.namespace == namespace
        for one in pod.conditions
        if one.type == ISOLATION_READY
    }


def test_egress_policy_without_the_relay_steps_back_and_restarts_nothing(
    calico: Calico,
    podgate: Deployment,
    namespaces: Namespaces,
    record_property: Callable[[str, object], None],
) -> None:
    users = namespaces("strict")
    pods = workload.run(users)

    def all_have(reason: str) -> bool:
        """But for the client, which has no probe, so it needs no relay."""
        found = isolation(podgate, users.namespace)
        needs = [one for name, one in found.items() if name != "client"]
        return bool(needs) and all(one.startswith(reason) for one in needs)

    with host_endpoint(calico, *_NODE_AND_PODS):
        if calico.data_plane is DataPlane.EBPF:
            # felix polices its data interfaces only, of which the relay's is none.
            record_property("figures", "stays strict")
            assert traffic.holds_for(_HEALTHY_SECONDS, lambda: workload.harm(users)) == ""
            assert all_have("Strict")
        else:
            polling.wait_until("the step back", lambda: all_have("Enforced"))
            said = isolation(podgate, users.namespace)["web"]
            record_property("figures", said)
            assert "the node does not reach the relay" in said
            assert "cali" in said
            # A probe that was on its way at that instant fails once.
            polling.wait_until("probes pass", lambda: not workload.lasting_harm(users))
            assert traffic.holds_for(_HEALTHY_SECONDS, lambda: workload.lasting_harm(users)) == ""
            assert all(traffic.dial(address) for address in traffic.addresses(pods["web"]))
    polling.wait_until("strict again", lambda: all_have("Strict"))
    assert workload.lasting_harm(users) == ""


def test_egress_policy_that_admits_the_relays_ranges_keeps_strict(
    calico: Calico, podgate: Deployment, namespaces: Namespaces
) -> None:
    """As docs/guides/calico.md has it."""
    users = namespaces("strict")
    workload.run(users)
    ranges = [str(network) for network in DEFAULT_RELAY_RANGES.networks]
    with host_endpoint(calico, *_NODE_AND_PODS, *ranges):
        assert traffic.holds_for(_HEALTHY_SECONDS, lambda: workload.harm(users)) == ""
        found = isolation(podgate, users.namespace)
        assert all(one.startswith("Strict") for one in found.values()), found

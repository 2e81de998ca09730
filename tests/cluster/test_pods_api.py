"""The kubelet's pods API, which is off by default in 1.36: podgate works without it, too."""

from collections.abc import Iterator

import pytest

from agent.kubelet import pods_api
from tests import polling
from tests.cluster import podinfo
from tests.cluster.deployment import Deployment
from tests.cluster.kubelet import FEATURE_GATES
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    PROBED,
    PROBES_PASSING,
    Workloads,
    is_reachable,
)

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)


@pytest.fixture
def without_pods_api(node: OneNode, podgate: Deployment) -> Iterator[None]:
    node.kubelet.restart_with(featureGates=FEATURE_GATES | {"PodsAPI": False})
    node.kubelet.wait_until_ready()
    podgate.until("the kubelet's pods are not followed", lambda _: not _is_followed(podgate))
    yield
    node.kubelet.restart_with(featureGates=FEATURE_GATES)
    node.kubelet.wait_until_ready()
    podgate.until("the kubelet's pods are followed", lambda _: _is_followed(podgate))


def _is_followed(podgate: Deployment) -> bool:
    return 'podgate_component_up{component="kubelet_pods_api"} 1.0\n' in podgate.metrics()


def test_whole_pods_are_the_kubelets_own(podgate: Deployment, closed: Workloads) -> None:
    closed.run("a", PROBED, gates=BOTH)
    uid = closed.until_isolated("a")[0]["metadata"]["uid"]
    with podinfo.pods_api(podinfo.OWN_SOCKET) as own, podinfo.pods_api(pods_api.SOCKET) as kubelet:
        polling.wait_until(
            "both have the same pod",
            lambda: (
                podinfo.without_conditions(own(uid)) == podinfo.without_conditions(kubelet(uid))
            ),
        )


@pytest.mark.usefixtures("without_pods_api")
def test_pods_are_gated_probed_and_reported_without_it(
    node: OneNode, podgate: Deployment, closed: Workloads
) -> None:
    names = ("a", "b")
    for name in names:
        closed.run(name, PROBED, gates=BOTH)
    pods = closed.until_isolated(*names)
    assert not any(is_reachable(pod) for pod in pods)
    killed = podgate.kill_agent()
    podgate.until("the next agent has the pods", lambda report: report.pid != killed)
    assert not any(is_reachable(pod) for pod in pods)
    closed.run("c", PROBED, gates=BOTH)
    closed.until_isolated("a", "b", "c")
    with podinfo.client() as client:
        podinfo.until_as_in_the_api(client, node.api)
    # Whole pods, by the API server: with its images and the node's address.
    with podinfo.pods_api(podinfo.OWN_SOCKET) as own:
        whole = own(pods[0]["metadata"]["uid"])
    for text in (pods[0]["spec"]["containers"][0]["image"], pods[0]["status"]["hostIP"]):
        assert text.encode() in whole
    assert closed.restarts() == {}
    assert closed.unhealthy() == []

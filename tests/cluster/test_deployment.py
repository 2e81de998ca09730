"""podgate as deploy/manifests deploy it, and the first pods of its users."""

import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    PROBED,
    PROBES_PASSING,
    Workloads,
    condition,
    is_reachable,
)

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)


def test_daemonset_is_ready_as_applied_and_knows_the_kubelet(
    node: OneNode, podgate: Deployment
) -> None:
    before = podgate.restarts()
    report = podgate.until("the kubelet is known", lambda report: report.kubelet)
    directory = node.kubelet.daemon.cgroup
    assert report.kubelet is not None
    assert str(directory).endswith(report.kubelet)
    podgate.wait_until_ready()
    assert podgate.restarts() == before


def test_pods_without_labels_are_audited_and_stay_reachable(namespaces: Namespaces) -> None:
    users = namespaces()
    users.run("web", PROBED, gates=BOTH)
    (pod,) = users.until_ready("web")
    assert condition(pod, ISOLATION_READY)["reason"] == "Audit"
    assert condition(pod, PROBES_PASSING)["message"].startswith(
        "All 2 startup and readiness probes pass. (sandbox "
    )
    assert is_reachable(pod)


def test_labelled_namespace_is_closed_to_host_processes_and_its_probes_pass(
    closed: Workloads,
) -> None:
    closed.run("web", PROBED, gates=BOTH)
    (pod,) = closed.until_isolated("web")
    assert not is_reachable(pod)
    assert closed.restarts() == {}
    assert closed.unhealthy() == []

"""podgate as deploy/manifests deploy it, and the first pods of its users."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import polling
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    PORT,
    PROBED,
    PROBES_PASSING,
    Workloads,
    condition,
    is_reachable,
)
from tests.image.node import RUN_DIRECTORY

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


def test_podgate_drops_names_pod_port_and_process_of_a_drop(closed: Workloads) -> None:
    closed.run("web", PROBED, gates=BOTH)
    (pod,) = closed.until_isolated("web")
    assert not is_reachable(pod)
    process = pathlib.Path("/proc/self/comm").read_text(encoding="ascii").strip()
    row = re.compile(rf"{closed.namespace}/web .* tcp {PORT} .* {re.escape(process)} ")
    polling.wait_until("the drop is listed", lambda: row.search(_drops()))


def _drops() -> str:
    """As `podgate drops -o wide` prints them."""
    command = [sys.executable, "-m", "agent", "drops", "--output=wide"]
    done = subprocess.run(
        [*command, f"--run-directory={RUN_DIRECTORY}"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
        timeout=60,
        check=True,
    )
    return done.stdout

"""Many new pods at once on a node whose default is enforce: none is open, whatever the network's
policy engine does."""

import functools
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import ISOLATION_READY, WEB, Workloads, condition
from tests.networks import traffic
from tests.networks.network import Network

pytestmark = pytest.mark.kernel

PODS = 20
OPEN_SECONDS = 0.1
RIGHT_SECONDS = 1.0
_STOPPED_SECONDS = 12.0
_HTTP: Json = {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1}
# Without liveness: while Calico's felix is stopped it drops what pods send to the node.
_POD: Json = {**WEB, "readinessProbe": _HTTP}
EngineEvent = Callable[[Network], None]


def runs(network: Network) -> None:
    assert network.engine.is_running


def is_stopped_meanwhile(network: Network) -> None:
    """It attaches its programs to all pods after podgate has: the more filters it deletes."""
    network.engine.pause()
    time.sleep(_STOPPED_SECONDS)
    network.engine.resume()


def is_restarted(network: Network) -> None:
    network.restart()


def is_killed(network: Network) -> None:
    network.restart(signal.SIGKILL)


@pytest.fixture
def users(enforcing_node: OneNode, namespaces: Namespaces) -> Workloads:
    return namespaces("enforce")


@pytest.mark.parametrize("engine", [runs, is_stopped_meanwhile, is_restarted, is_killed])
def test_no_pod_of_a_burst_is_open(
    network: Network,
    podgate: Deployment,
    users: Workloads,
    engine: EngineEvent,
    record_property: Callable[[str, object], None],
) -> None:
    names = [f"web-{number}" for number in range(PODS)]
    with traffic.syns(network) as syns:
        for name in names:
            users.run(name, _POD, gates=(ISOLATION_READY,))
        engine(network)
        users.until_isolated(*names)
        # Whatever the engine still does to their interfaces, and gates that become links.
        time.sleep(5)
    record_property("figures", syns.summary)
    assert len(syns.targets) >= network.families * PODS
    assert min(one.sent for one in syns.targets.values()) > 0
    assert syns.open_seconds < OPEN_SECONDS, syns.summary
    assert users.restarts() == {}
    for pod in users.pods():
        assert condition(pod, ISOLATION_READY)["reason"] == "Enforced"
        assert all(traffic.dial(address) != "" for address in traffic.addresses(pod))


def test_deleted_qdiscs_open_no_pod(
    network: Network,
    podgate: Deployment,
    users: Workloads,
    record_property: Callable[[str, object], None],
) -> None:
    """As Calico's felix deletes them, but again and again, while the pods are a crowd."""
    names = [f"web-{number}" for number in range(PODS)]
    is_over = threading.Event()
    deleted = 0

    def delete() -> None:
        nonlocal deleted
        while not is_over.wait(0.3):
            for interface in sorted(_interfaces(podgate, users)):
                command = ["tc", "qdisc", "del", "dev", interface, "clsact"]
                deleted += subprocess.run(command, capture_output=True, check=False).returncode == 0

    thread = threading.Thread(target=delete)
    with traffic.syns(network) as syns:
        for name in names:
            users.run(name, _POD, gates=(ISOLATION_READY,))
        thread.start()
        users.until_isolated(*names)
        is_over.set()
        thread.join()
        time.sleep(1)
    record_property("figures", f"{syns.summary}, {deleted} qdiscs deleted")
    assert syns.open_seconds < OPEN_SECONDS, syns.summary
    polling.wait_until(
        "each condition is right", functools.partial(_are_enforced, podgate, users), seconds=60
    )
    assert users.restarts() == {}


def _interfaces(podgate: Deployment, users: Workloads) -> set[str]:
    report = podgate.report()
    pods = report.pods if report else []
    return {
        gate.interface for pod in pods if pod.namespace == users.namespace for gate in pod.gates
    }


def _are_enforced(podgate: Deployment, users: Workloads) -> bool:
    report = podgate.report()
    reasons = {
        one.reason
        for pod in (report.pods if report else [])
        if pod.namespace == users.namespace
        for one in pod.conditions
        if one.type == ISOLATION_READY
    }
    return reasons == {"Enforced"}

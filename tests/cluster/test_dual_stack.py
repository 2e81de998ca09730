"""Pods with an address of each family, and a kubelet that probes the one of IPv6."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.cluster import families
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import ISOLATION_READY, PORT, PROBED, PROBES_PASSING

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)
_CONNECT_SECONDS = 1


@pytest.fixture(scope="module")
def dual_stack(bare_cluster: OneNode, podgate: Deployment) -> Iterator[OneNode]:
    with families.dual_stack(bare_cluster):
        yield bare_cluster


def _reachable(pod: Json) -> list[str]:
    """Addresses of the pod to which this process, a process of the node, can connect."""
    found = []
    for address in (one["ip"] for one in pod["status"]["podIPs"]):
        with contextlib.suppress(PermissionError, TimeoutError):
            socket.create_connection((address, PORT), _CONNECT_SECONDS).close()
            found.append(address)
    return found


@pytest.mark.parametrize("mode", ["audit", "enforce", "strict"])
def test_both_addresses_are_gated_and_the_kubelet_probes_by_ipv6(
    dual_stack: OneNode, podgate: Deployment, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    names = ("a", "b")
    for name in names:
        users.run(name, PROBED, gates=BOTH)
    pods = users.until_isolated(*names)
    for pod in pods:
        assert ":" in pod["status"]["podIP"]
        both = [one["ip"] for one in pod["status"]["podIPs"]]
        assert len(both) == 2
        assert _reachable(pod) == (both if mode == "audit" else [])
    dual_stack.kubelet.restart()
    dual_stack.kubelet.wait_until_ready()
    killed = podgate.kill_agent()
    podgate.until("the next agent responds", lambda report: report.pid != killed)
    users.until_isolated(*names)
    assert [_reachable(pod) == [] for pod in pods] == [mode != "audit"] * len(pods)
    if mode == "strict":
        podgate.until(
            "the relay proxies by IPv6",
            lambda report: all(
                pod.relayed for pod in report.pods if pod.namespace == users.namespace
            ),
        )
    assert users.restarts() == {}
    assert users.unhealthy() == []

"""Two replicas of the controller on a real API server: one leads, and the other one follows it."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api_only import CONTROLLER_ADDRESS, ApiOnly, Replica
from tests.image import manifests

pytestmark = pytest.mark.kernel
_KINDS = {
    *("Namespace", "CustomResourceDefinition", "ServiceAccount", "Service"),
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
}
_LEASE = "/apis/coordination.k8s.io/v1/namespaces/podgate/leases/podgate-controller"
_POLICIES = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    with api_only.running(conftest.binaries(), tmp_path_factory.mktemp("api")) as made:
        for thing in manifests.applied():
            if thing["kind"] == "Service":
                thing["spec"]["clusterIP"] = CONTROLLER_ADDRESS
            if thing["kind"] in _KINDS:
                made.api.create(deployment.PATHS[thing["kind"]], thing)
        yield made


@pytest.fixture
def replicas(server: ApiOnly) -> Iterator[tuple[Replica, Replica]]:
    """The leader, and the one that waits."""
    with contextlib.ExitStack() as undo:
        first = undo.enter_context(server.controller())
        polling.wait_until("the first leads", lambda: first.is_leading)
        second = undo.enter_context(server.controller(port=9652, webhook=9444))
        second.wait_until_ready()
        assert not second.is_leading
        yield first, second
    server.api.delete(_LEASE)


def _transitions(server: ApiOnly) -> int:
    return int(server.api.get(_LEASE)["spec"].get("leaseTransitions", 0))


def test_leader_that_ends_regularly_is_followed_at_once(
    server: ApiOnly, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(30) == 0
    polling.wait_until("the second leads", lambda: second.is_leading)
    # Released, it is not waited for: the record has no holder of which to wait for the end.
    assert _transitions(server) == 1
    assert "Traceback" not in first.log()


def test_leader_that_hangs_is_followed_and_does_not_write_when_it_continues(
    server: ApiOnly, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    first.process.send_signal(signal.SIGSTOP)
    try:
        polling.wait_until("the second leads", lambda: second.is_leading)
        holder = server.api.get(_LEASE)["spec"]["holderIdentity"]
    finally:
        first.process.send_signal(signal.SIGCONT)
    polling.wait_until("the first knows", lambda: "leadership_lost" in first.log())
    assert not first.is_leading
    assert second.is_leading
    assert server.api.get(_LEASE)["spec"]["holderIdentity"] == holder
    # It waits, and can lead again.
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(30) == 0
    polling.wait_until("the first leads again", lambda: first.is_leading)


def test_new_leader_writes_what_was_lost_meanwhile(
    server: ApiOnly, replicas: tuple[Replica, Replica]
) -> None:
    first, second = replicas
    path = f"{_POLICIES}/web"
    policy = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "web"},
        "spec": {"pods": {"podSelector": {}}, "from": [{"kernel": {}}]},
    }
    server.api.create(_POLICIES, policy)
    polling.wait_until("it has a status", lambda: server.api.get(path).get("status"))
    first.process.kill()
    first.process.wait(30)
    server.api.delete(path)
    server.api.create(_POLICIES, policy)
    polling.wait_until("the second leads", lambda: second.is_leading)
    polling.wait_until("it has a status again", lambda: server.api.get(path).get("status"))

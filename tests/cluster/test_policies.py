"""HostAccessPolicies of a real API server, with the CustomResourceDefinition of the manifests."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster.api import ApiError, Json
from tests.cluster.conftest import Namespaces
from tests.cluster.one_node import NAME, OneNode
from tests.cluster.workloads import ISOLATION_READY, PORT, Workloads, is_reachable
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel
_PATH = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_CONNECT = (
    "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"
)


@pytest.fixture
def backup() -> Iterator[Cgroup]:
    """The cgroup of a host process that users want to admit."""
    with cgroups.cgroup() as group:
        yield group


@pytest.fixture
def policies(node: OneNode) -> Iterator[None]:
    """Those of a test are deleted with it."""
    yield
    node.api.delete(_PATH)


def _policy(backup: Cgroup, namespace: str) -> Json:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "backup"},
        "spec": {
            "pods": {"namespaces": [namespace], "podSelector": {"matchLabels": {"app": "web"}}},
            "from": [{"cgroup": {"path": backup.path}}],
            "ports": [{"port": PORT}],
        },
    }


def _connects(backup: Cgroup, pod: Json) -> bool:
    """Whether a process of that cgroup can connect to the pod."""
    process = backup.popen([sys.executable, "-c", _CONNECT, pod["status"]["podIP"], str(PORT)])
    try:
        return process.wait(30) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        return False


@pytest.mark.usefixtures("policies")
def test_policy_admits_its_source_to_its_pods_while_it_exists(
    node: OneNode, namespaces: Namespaces, backup: Cgroup
) -> None:
    users: Workloads = namespaces("enforce")
    for name in ("web", "other"):
        users.run(name, gates=(ISOLATION_READY,))
    web, other = users.until_ready("web", "other")
    assert not _connects(backup, web)

    node.api.create(_PATH, _policy(backup, users.namespace))
    polling.wait_until("the source is admitted", lambda: _connects(backup, web))
    assert not _connects(backup, other)
    assert not is_reachable(web)

    node.api.delete(f"{_PATH}/backup")
    polling.wait_until("the source is admitted no more", lambda: not _connects(backup, web))


@pytest.mark.usefixtures("policies")
def test_status_shows_when_all_nodes_have_the_policy(
    node: OneNode, namespaces: Namespaces, backup: Cgroup
) -> None:
    users: Workloads = namespaces("enforce")
    users.run("web", gates=(ISOLATION_READY,))
    users.until_ready("web")
    node.api.create(_PATH, _policy(backup, users.namespace))

    def is_programmed() -> bool:
        status = node.api.get(f"{_PATH}/backup").get("status", {})
        found = {one["type"]: one["status"] for one in status.get("conditions", ())}
        return found == {"Accepted": "True", "Programmed": "True"}

    polling.wait_until("the controller has written the status", is_programmed, seconds=240)
    status = node.api.get(f"{_PATH}/backup")["status"]
    assert status["nodes"] == {"selected": 1, "programmed": 1, "failed": 0}
    assert status["observedGeneration"] == 1
    # The agent wrote it with its own token, past the guards.
    report = node.api.get(f"/apis/podgate.io/v1alpha1/nodereports/{NAME}")
    assert report["metadata"]["ownerReferences"][0]["name"] == NAME
    assert report["status"]["policies"]["count"] == 1


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"from": []}, "spec.from"),
        ({"form": [{"kernel": {}}]}, "spec"),
        ({"ports": [{"port": 70000}]}, "spec.ports[0].port"),
    ],
)
def test_api_server_rejects_a_policy_with_a_mistake(
    node: OneNode, podgate: object, backup: Cgroup, change: Json, field: str
) -> None:
    policy = _policy(backup, "shop")
    policy["spec"] |= change
    with pytest.raises(ApiError) as error:
        node.api.create(_PATH, policy, fieldValidation="Strict")
    assert error.value.code in (400, 422)
    assert field in str(error.value)

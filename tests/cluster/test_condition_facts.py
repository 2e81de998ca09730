"""What the API server and the kubelet do with conditions of others: podgate's writes rely on it."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import containers
from tests.cluster.api import STRATEGIC, ApiError, Json
from tests.cluster.conftest import Namespaces
from tests.cluster.containers import FRAGILE, FRAGILE_VOLUMES
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import NAME, OneNode
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    PROBED,
    Workloads,
    condition,
    is_reachable,
)

pytestmark = pytest.mark.kernel
_FOREIGN = "tests.podgate.io/counted"
_PATCHES = 1500
_FLIPS = 10


def _patch(users: Workloads, name: str, change: Json, **metadata: str) -> Json:
    """One condition, as podgate writes it; the pod afterwards."""
    body: Json = {"status": {"conditions": [change]}}
    if metadata:
        body["metadata"] = metadata
    return users.api.patch(f"{users.pods_path}/{name}/status", body, STRATEGIC)


def _rejected(users: Workloads, name: str, **metadata: str) -> ApiError:
    with pytest.raises(ApiError) as raised:
        _patch(users, name, {"type": _FOREIGN, "status": "True"}, **metadata)
    return raised.value


def test_kubelet_keeps_a_condition_that_changes_beside_its_own(
    podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    probed = {**FRAGILE, "readinessProbe": {**HTTP_PROBE, "failureThreshold": 1}}
    users.run("web", probed, gates=(ISOLATION_READY,), volumes=FRAGILE_VOLUMES)
    (pod,) = users.until_isolated("web")
    for number in range(1, _PATCHES + 1):
        status = "True" if number % 2 else "False"
        _patch(users, "web", {"type": _FOREIGN, "status": status, "message": str(number)})
        if number % (_PATCHES // _FLIPS) == 0:
            # The kubelet writes its own conditions meanwhile.
            flip = number // (_PATCHES // _FLIPS)
            containers.set_health(pod, is_healthy=flip % 2 == 0)
            users.until("web", "Ready", "False" if flip % 2 else "True")
            found = condition(users.pod("web"), _FOREIGN)
            assert found["message"] == str(number)
    (after,) = users.until_isolated("web")
    assert condition(after, ISOLATION_READY) == condition(pod, ISOLATION_READY)


def test_patch_that_changes_nothing_makes_no_new_version(namespaces: Namespaces) -> None:
    users = namespaces("enforce")
    users.run("web", gates=(ISOLATION_READY,))
    (pod,) = users.until_isolated("web")
    same = condition(pod, ISOLATION_READY)
    before = _patch(users, "web", {"type": _FOREIGN, "status": "True"})
    after = _patch(users, "web", same, uid=pod["metadata"]["uid"])
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_patch_of_a_replaced_pod_is_rejected(namespaces: Namespaces) -> None:
    users = namespaces("enforce")
    old = users.run("web")
    users.until_ready("web")
    users.delete("web")
    users.until_gone("web")
    uid, version = old["metadata"]["uid"], old["metadata"]["resourceVersion"]
    assert _rejected(users, "web", uid=uid).code == 404
    users.run("web")
    wrong = _rejected(users, "web", uid=uid)
    assert wrong.code == 422
    assert "metadata.uid" in str(wrong)
    assert _rejected(users, "web", resourceVersion=version).code == 409


def test_container_without_a_readiness_probe_is_ready_again_unprobed(
    node: OneNode, namespaces: Namespaces
) -> None:
    """So isolation has to hold over its restart without a change of the condition."""
    users = namespaces("enforce")
    users.run("web", gates=(ISOLATION_READY,))
    (before,) = users.until_isolated("web")
    containers.kill_container(node.runtime, before)
    polling.wait_until("the container restarted", users.restarts)
    (after,) = users.until_isolated("web")
    assert condition(after, ISOLATION_READY) == condition(before, ISOLATION_READY)
    assert not is_reachable(after)


def test_unmet_gate_is_shown_by_the_wide_output_only(node: OneNode, namespaces: Namespaces) -> None:
    users = namespaces("enforce")
    users.run("web", gates=(ISOLATION_READY, _FOREIGN))
    users.until("web", "ContainersReady")
    pod = users.until("web", "Ready", "False", "ReadinessGatesNotReady")
    assert condition(pod, ISOLATION_READY)["status"] == "True"
    plain, wide = (_kubectl(node, users, *more) for more in ((), ("--output=wide",)))
    assert plain["READY"] == "1/1"
    assert "READINESS GATES" not in plain
    assert wide["READINESS GATES"] == "1/2"
    _patch(users, "web", {"type": _FOREIGN, "status": "True"})
    users.until_ready("web")


def _kubectl(node: OneNode, users: Workloads, *more: str) -> dict[str, str]:
    """The columns of `kubectl get pods` for the only pod."""
    command = shutil.which("kubectl")
    if command is None:
        pytest.fail("kubectl is not installed; put it into PATH", pytrace=False)
    kubeconfig = node.control_plane.kubeconfig("admin")
    where = [f"--kubeconfig={kubeconfig}", f"--cache-dir={kubeconfig.parent / 'kubectl-cache'}"]
    arguments = [command, *where, "get", "pods", f"--namespace={users.namespace}", *more]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60)
    header, row = output.stdout.splitlines()
    # Columns are aligned; names have single spaces in them.
    starts = [
        i for i, letter in enumerate(header) if letter != " " and header[:i][-2:] in ("", "  ")
    ]
    ends = [*starts[1:], None]
    return {
        header[start:end].strip(): row[start:end].strip()
        for start, end in zip(starts, ends, strict=True)
    }


def test_readiness_gates_of_a_pod_cannot_be_changed(namespaces: Namespaces) -> None:
    users = namespaces()
    users.run("web", gates=(ISOLATION_READY,))
    for gates in ([], [{"conditionType": ISOLATION_READY}, {"conditionType": _FOREIGN}]):
        with pytest.raises(ApiError) as raised:
            users.api.patch(f"{users.pods_path}/web", {"spec": {"readinessGates": gates}})
        assert raised.value.code == 422


@pytest.fixture
def static_pod(node: OneNode, podgate: Deployment, namespaces: Namespaces) -> Iterator[Workloads]:
    """A pod of a manifest of the kubelet with podgate's readiness gate; its namespace."""
    users = namespaces("enforce")
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "static", "namespace": users.namespace},
        "spec": {
            "readinessGates": [{"conditionType": ISOLATION_READY}],
            "terminationGracePeriodSeconds": 1,
            "containers": [PROBED],
        },
    }
    manifest = node.kubelet.manifests / "static.json"
    manifest.write_text(json.dumps(body))
    yield users
    manifest.unlink()
    users.until_gone(f"static-{NAME}")


def test_static_pod_is_isolated_and_never_meets_a_gate(
    podgate: Deployment, static_pod: Workloads
) -> None:
    """Its condition is in the mirror pod, which the kubelet does not read; the uids differ."""
    name = f"static-{NAME}"
    polling.wait_until(
        "the mirror pod exists",
        lambda: static_pod.api.find(f"{static_pod.pods_path}/{name}"),
        seconds=120,
    )
    static_pod.until(name, "ContainersReady")
    mirror = static_pod.until(name, ISOLATION_READY, "True", "Enforced")
    assert not is_reachable(mirror)
    assert condition(mirror, "Ready")["reason"] == "ReadinessGatesNotReady"
    uid_of_node = mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"]
    assert uid_of_node != mirror["metadata"]["uid"]
    status = podgate.pod_status(static_pod.namespace, name)
    assert status is not None
    assert status.uid == uid_of_node
    assert status.gates
    assert static_pod.restarts() == {}

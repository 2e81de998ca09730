"""Sources of a real cluster: a hostNetwork DaemonSet that is rolled over, and the API server."""

import base64
import inspect
import pathlib
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import reviewer
from tests.cluster.api import ApiError, Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import IMAGE, OneNode
from tests.cluster.workloads import ISOLATION_READY, PORT, Workloads, is_reachable

pytestmark = pytest.mark.kernel
_POLICIES = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"

# Connects until it succeeds, then every 20 ms, until SIGTERM; a failure after the first success is
# a line of the file. Ready means that it has succeeded.
_CONNECTING = """
import os, pathlib, signal, socket, sys, time
address, port, directory, name = sys.argv[1:]
port, directory = int(port), pathlib.Path(directory)
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
succeeded = 0
while not ended:
    try:
        socket.create_connection((address, port), 5).close()
        succeeded += 1
        pathlib.Path("/tmp/connected").touch()
    except OSError as error:
        if succeeded:
            with (directory / "failures").open("a") as failures:
                failures.write(f"{name} {error}\\n")
    time.sleep(0.02)
(directory / f"ended-{name}").write_text(str(succeeded))
"""


@pytest.fixture
def policies(node: OneNode) -> Iterator[None]:
    """Those of a test are deleted with it."""
    yield
    node.api.delete(_POLICIES)


def _daemon_set(users: Workloads, address: str, directory: pathlib.Path, version: str) -> Json:
    container = {
        "name": "agent",
        "image": IMAGE,
        "command": ["/usr/bin/python3", "-c", _CONNECTING],
        "args": [address, str(PORT), str(directory), "$(POD_NAME)"],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "VERSION", "value": version},
        ],
        "readinessProbe": {
            "exec": {"command": ["/usr/bin/python3", "-c", "open('/tmp/connected')"]},
            "periodSeconds": 1,
            "timeoutSeconds": 10,
        },
        "volumeMounts": [
            {"name": "results", "mountPath": str(directory)},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "agent"},
        "spec": {
            "selector": {"matchLabels": {"app": "agent"}},
            "updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": {"app": "agent"}},
                "spec": {
                    "hostNetwork": True,
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 30,
                    "containers": [container],
                    "volumes": [
                        {"name": "results", "hostPath": {"path": str(directory)}},
                        {"name": "tmp", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _is_rolled_out(users: Workloads, path: str) -> bool:
    found = users.api.get(f"{path}/agent")
    status = found["status"]
    agents = [pod for pod in users.pods() if pod["metadata"]["labels"].get("app") == "agent"]
    return (
        status.get("observedGeneration") == found["metadata"]["generation"]
        and status.get("updatedNumberScheduled") == 1
        and status.get("numberReady") == 1
        and len(agents) == 1
    )


@pytest.mark.usefixtures("policies")
def test_rolled_over_daemon_set_keeps_its_access_without_a_gap(
    node: OneNode, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    users.run("web", gates=(ISOLATION_READY,))
    (web,) = users.until_ready("web")
    address = web["status"]["podIP"]
    selector = {"namespaces": [users.namespace], "podSelector": {"matchLabels": {"app": "agent"}}}
    node.api.create(
        _POLICIES,
        {
            "apiVersion": "policy.podgate.io/v1alpha1",
            "kind": "HostAccessPolicy",
            "metadata": {"name": "agents"},
            "spec": {
                "pods": {"namespaces": [users.namespace]},
                "from": [{"hostNetworkPods": selector}],
                "ports": [{"port": PORT}],
            },
        },
    )
    directory = node.runtime.directory / f"results-{users.namespace}"
    directory.mkdir(mode=0o777)
    path = f"/apis/apps/v1/namespaces/{users.namespace}/daemonsets"
    node.api.create(path, _daemon_set(users, address, directory, "1"))
    polling.wait_until("it is ready", lambda: _is_rolled_out(users, path), seconds=180)
    for version in ("2", "3"):
        changed = _daemon_set(users, address, directory, version)
        node.api.patch(f"{path}/agent", {"spec": changed["spec"]})
        polling.wait_until("it is rolled out", lambda: _is_rolled_out(users, path), seconds=180)
    assert not is_reachable(web)
    node.api.delete(f"{path}/agent", propagationPolicy="Background")
    polling.wait_until("its pods are gone", lambda: len(users.pods()) == 1, seconds=180)
    assert len(list(directory.glob("ended-*"))) == 3
    assert not (directory / "failures").exists(), (directory / "failures").read_text()


def test_api_server_calls_a_webhook_under_enforce_without_a_policy(
    node: OneNode, podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    pki = node.control_plane.pki
    name = f"review.{users.namespace}.svc"
    pki.sign("review", user="review", hosts=f"DNS:{name}")
    data = {
        "reviewer.py": inspect.getsource(reviewer),
        "tls.crt": pki.certificate("review").read_text(),
        "tls.key": pki.key("review").read_text(),
    }
    namespace = f"/api/v1/namespaces/{users.namespace}"
    node.api.create(f"{namespace}/configmaps", {"metadata": {"name": "review"}, "data": data})
    container = {
        "name": "review",
        "image": IMAGE,
        "command": ["/usr/bin/python3", "/app/reviewer.py", "/app"],
        "ports": [{"name": "webhook", "containerPort": reviewer.PORT}],
        "volumeMounts": [{"name": "app", "mountPath": "/app"}],
    }
    volumes = [{"name": "app", "configMap": {"name": "review"}}]
    users.run("review", container, gates=(ISOLATION_READY,), volumes=volumes)
    users.until("review", ISOLATION_READY, "True", "Enforced")
    (pod,) = users.until_ready("review")
    ports = [{"port": 443, "targetPort": "webhook"}]
    node.api.create(
        f"{namespace}/services",
        {"metadata": {"name": "review"}, "spec": {"selector": {"app": "review"}, "ports": ports}},
    )
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["configmaps"],
    }
    webhook = {
        "name": "review.example.com",
        "clientConfig": {
            "service": {"namespace": users.namespace, "name": "review"},
            "caBundle": base64.b64encode(pki.authority.read_bytes()).decode(),
        },
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": users.namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    assert not is_reachable(pod, reviewer.PORT)
    node.api.create(
        _WEBHOOKS,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": users.namespace},
            "webhooks": [webhook],
        },
    )
    try:
        made: list[str] = []

        def is_reviewed() -> bool:
            number = str(len(made))
            try:
                node.api.create(f"{namespace}/configmaps", {"metadata": {"name": f"made-{number}"}})
            except ApiError as error:
                # Until the service has endpoints, and the rule is in force.
                if "review.example.com" not in str(error):
                    raise
                return False
            made.append(number)
            return _calls(podgate, users) > 0

        polling.wait_until("the webhook is called and answers", is_reviewed)
        assert not is_reachable(pod, reviewer.PORT)
    finally:
        node.api.delete(f"{_WEBHOOKS}/{users.namespace}")
    polling.wait_until("the rule is gone", lambda: _calls(podgate, users) == -1)


def _calls(podgate: Deployment, users: Workloads) -> int:
    """New connections that the default rule for the webhook admitted; -1: there is no such rule."""
    name = f"podgate:api-server/{users.namespace}/review:webhook"
    for policy in podgate.rules().policies:
        if policy.name == name:
            return sum(rule.hits for rule in policy.rules)
    return -1

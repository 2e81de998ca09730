"""`kubectl podgate uninstall` of all that the chart installs, and the next installation."""

import base64
import functools
import json
import pathlib
import subprocess

import pytest

from agent.lab import leftovers
from agent.lab.lab import NODE_IPV4
from bpf import pins
from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane import SERVICE_ADDRESS
from tests.cluster.deployment import NAMESPACE, PATHS, Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.test_way_out import GATES, conditions, in_api, in_kernel, kubectl
from tests.cluster.workloads import PROBED, condition, is_reachable
from tests.image.node import BPFFS, RUN_DIRECTORY

pytestmark = pytest.mark.kernel

_POLICIES = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_STATE = pathlib.Path("/var/lib/podgate")
# The proxy gets services from the agent, which gets them from the hub.
_VALUES: Json = {
    "services": {"enabled": True, "hubs": f"{NODE_IPV4}:9653"},
    "hub": {"enabled": True, "replicas": 1},
    "proxy": {"enabled": True},
}
_NODE_SECONDS = 120


@pytest.fixture
def everything(node: OneNode, podgate: Deployment, helm: str) -> None:
    """podgate with proxy and hub: an upgrade of what is installed."""
    pki = node.control_plane.pki
    pki.sign("services", user="podgate-services", hosts=f"IP:{NODE_IPV4}")
    files = {"ca.crt": pki.authority, "tls.crt": pki.certificate("services")}
    files["tls.key"] = pki.key("services")
    data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
    secret = {"metadata": {"name": "podgate-services-tls"}, "type": "Opaque", "data": data}
    node.api.create(PATHS["Secret"], {"apiVersion": "v1", "kind": "Secret", **secret})
    podgate.wait_until_available()
    if helm:
        podgate.install(helm, node.control_plane.kubeconfig("admin"), _VALUES)
    else:
        podgate.apply_chart(_VALUES | {"namespace": {"create": True}})
    podgate.wait_until_ready()
    for name in ("podgate-hub", "podgate-proxy"):
        polling.wait_until(f"{name} is ready", functools.partial(_is_ready, node, name))
    polling.wait_until("the proxy serves", lambda: SERVICE_ADDRESS in _rules())
    polling.wait_until("services are saved", lambda: list(_STATE.glob("*.json")))
    assert _is_trusted(node)
    if helm:
        # A hook, which ended before Helm did.
        assert not node.api.find(f"{PATHS['ClusterRoleBinding']}/podgate-webhook-certificate")


def _is_trusted(node: OneNode) -> bool:
    """Whether the API server trusts the controller."""
    path = f"{PATHS['ValidatingWebhookConfiguration']}/podgate-webhook-probe-spec"
    return all(one["clientConfig"].get("caBundle") for one in node.api.get(path)["webhooks"])


def _is_ready(node: OneNode, name: str) -> bool:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pods = node.api.items(path, labelSelector=f"app.kubernetes.io/name={name}")
    return bool(pods) and all(condition(pod, "Ready").get("status") == "True" for pod in pods)


def _rules() -> str:
    command = ["nft", "list", "ruleset"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _isolation(pod: Json) -> str:
    return str(condition(pod, GATES[0]).get("reason", ""))


def policy() -> Json:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "kept"},
        "spec": {"pods": {"podSelector": {}}, "from": [{"kernel": {}}]},
    }


def test_uninstall_with_proxy_and_hub_leaves_only_what_it_names(
    node: OneNode,
    podgate: Deployment,
    everything: None,
    helm: str,
    namespaces: Namespaces,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    users = namespaces("enforce")
    users.run("web", PROBED, gates=GATES)
    users.until_isolated("web")
    node.api.create(_POLICIES, policy())

    assert kubectl(node, "uninstall") == 1
    plan = capsys.readouterr().out
    assert "podgate-hub, podgate-proxy" in plan
    assert "install kube-proxy" in plan
    # The namespace's label would outlive it.
    assert kubectl(node, "uninstall", "--yes") == 1
    assert f"namespace {users.namespace}: podgate.io/mode=enforce" in capsys.readouterr().out
    assert not is_reachable(users.pod("web"))

    programs = leftovers.program_ids(pins.Pins(BPFFS))
    file = tmp_path / "policies.json"
    options = ("--yes", "--labels=keep", f"--node-timeout={_NODE_SECONDS}")
    status = kubectl(node, "uninstall", *options, f"--policies-file={file}")
    printed = capsys.readouterr()
    assert status == 0, printed
    assert "podgate is removed." in printed.out
    assert f"kubectl label namespace {users.namespace} podgate.io/mode-" in printed.out
    assert f"After the next installation: kubectl apply -f {file}" in printed.out

    polling.wait_until("nothing in the kernel", lambda: not in_kernel(programs))
    assert SERVICE_ADDRESS not in _rules()
    for path in (BPFFS / "podgate", RUN_DIRECTORY, _STATE):
        assert not path.exists()
    # Helm made the namespace, and has its record there.
    assert in_api(node) == ([f"/api/v1/namespaces/{NAMESPACE}"] if helm else [])
    pod = users.pod("web")
    assert conditions(pod) == dict.fromkeys(GATES, ("True", "Removed"))
    assert condition(pod, "Ready")["status"] == "True"
    assert is_reachable(pod)
    assert users.restarts() == {}

    if helm:
        kubeconfig = node.control_plane.kubeconfig("admin")
        podgate.remove(helm, kubeconfig)
        podgate.install(helm, kubeconfig)
    else:
        podgate.apply()
    podgate.wait_until_ready()
    # What is older than this installation waits for a confirmation.
    polling.wait_until("a gate in audit", lambda: _isolation(users.pod("web")) == "Audit")
    assert is_reachable(users.pod("web"))
    kubectl(node, "status")
    confirmation = f"kubectl label namespace {users.namespace} podgate.io/left-behind-"
    assert confirmation in capsys.readouterr().out
    users.confirm_labels()
    users.until_isolated("web")
    assert not is_reachable(users.pod("web"))
    assert users.restarts() == {}
    (saved,) = json.loads(file.read_text(encoding="utf-8"))["items"]
    node.api.create(_POLICIES, saved)
    node.api.delete(f"{_POLICIES}/kept")

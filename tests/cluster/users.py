"""An API server with podgate's rights and guards, an agent's pod, and users who hold each role.

| user | has |
|---|---|
| auditor | podgate-audit, podgate-view |
| operator | the same, podgate-operate |
| verifier | podgate-verify |
| editor | edit in shop, podgate-reach |
| developer | view in shop |
| stranger | nothing |
"""

import asyncio
import contextlib
import pathlib
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from agent.admin.report import AgentReport
from agent.app.reading import Reading
from agent.app.remote_metrics import RemoteMetrics
from agent.kube.client import ApiClient
from agent.lab.lab import NODE_IPV4
from agent.operate.explain.model import Check, PodExplanation
from agent.operate.kubectl import main
from tests import polling
from tests.agent.app.two_pods import Agent
from tests.cluster import api_only, conftest
from tests.cluster.api import Json
from tests.cluster.api_only import ApiOnly
from tests.image import manifests

PORT = 9652
PODS = "/api/v1/namespaces/podgate/pods"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
IN_PODGATE = {
    "ServiceAccount": "/api/v1/namespaces/podgate/serviceaccounts",
    "Role": f"{RBAC}/namespaces/podgate/roles",
    "DaemonSet": "/apis/apps/v1/namespaces/podgate/daemonsets",
}
CLUSTER_WIDE = {
    "Namespace": "/api/v1/namespaces",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
GUARDS = {
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
}
_USERS_GUARDS = ("podgate-reading", "podgate-verify", "podgate-verify-image")
# What edit and view are made of, by a controller that does not run here.
EDIT, VIEW = "system:aggregate-to-edit", "system:aggregate-to-view"
GRANTED = {
    "auditor": (("ClusterRole", "podgate-audit", ""), ("Role", "podgate-view", "podgate")),
    "operator": (
        *(("ClusterRole", "podgate-audit", ""), ("ClusterRole", "podgate-operate", "")),
        *(("Role", "podgate-view", "podgate"), ("Role", "podgate-operate", "podgate")),
    ),
    "verifier": (("ClusterRole", "podgate-verify", ""), ("Role", "podgate-verify", "podgate")),
    "editor": (
        *(("ClusterRole", EDIT, "shop"), ("ClusterRole", VIEW, "shop")),
        ("Role", "podgate-reach", "podgate"),
    ),
    "developer": (("ClusterRole", VIEW, "shop"),),
    "stranger": (),
}


def explain(name: str, report: AgentReport) -> PodExplanation:
    namespace, _, short = name.partition("/")
    check = Check(name="gate", state="ok", text="the gate is in force")
    return PodExplanation(
        namespace=namespace, name=short, uid="u", is_well=True, from_agent=True, checks=[check]
    )


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[ApiOnly]:
    """With the manifests' rights and guards of users, an agent's pod at the node's address, and the
    users."""
    with api_only.running(conftest.binaries(), directory) as made:
        for thing in manifests.applied():
            kind, metadata = thing["kind"], thing["metadata"]
            if kind in CLUSTER_WIDE:
                made.api.create(CLUSTER_WIDE[kind], thing)
            elif kind in IN_PODGATE and metadata.get("namespace") == "podgate":
                made.api.create(IN_PODGATE[kind], thing)
            elif kind in GUARDS and metadata["name"] in _USERS_GUARDS:
                made.api.create(GUARDS[kind], thing)
        for name in ("shop", "bank"):
            made.api.create(CLUSTER_WIDE["Namespace"], {"metadata": {"name": name}})
        for name, roles in GRANTED.items():
            made.control_plane.pki.sign(name, user=name)
            for role in roles:
                bind(made, {"kind": "User", "name": name}, *role)
        # What the namespace's administrator adds, for its editors.
        accounts = "/api/v1/namespaces/shop/serviceaccounts"
        for name in ("podgate-view", "default"):
            made.api.create(accounts, {"metadata": {"name": name}})
        account = {"kind": "ServiceAccount", "name": "podgate-view", "namespace": "shop"}
        bind(made, account, "ClusterRole", VIEW, "shop")
        made.api.create(IN_PODGATE["ServiceAccount"], {"metadata": {"name": "default"}})
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        made.api.create("/api/v1/nodes", {"metadata": {"name": "node1", "labels": labels}})
        add_pods(made)
        # An account that reaches agents, and has no token for their answers.
        reach = {"kind": "ServiceAccount", "name": "podgate", "namespace": "podgate"}
        bind(made, reach, "Role", "podgate-reach", "podgate")
        polling.wait_until("the guard is in force", lambda: is_guarded(made))
        yield made


def is_guarded(server: ApiOnly) -> bool:
    """The API server reads new bindings and guards some moments after they are stored."""
    answer = server.send("GET", f"{PODS}/https:podgate-node1:1/proxy/", {}, token=token(server))
    return "read-only answers" in answer.message


def token(server: ApiOnly) -> str:
    return server.token("podgate")


def verifier_token(server: ApiOnly) -> str:
    """Of an account with the roles of `verifier`; made once."""
    name = "verifies"
    if server.api.find(f"{IN_PODGATE['ServiceAccount']}/{name}") is None:
        server.api.create(IN_PODGATE["ServiceAccount"], {"metadata": {"name": name}})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": "podgate"}
        for role in GRANTED["verifier"]:
            bind(server, subject, *role)
        # The API server reads new bindings some moments after they are stored.
        polling.wait_until("its rights are in force", lambda: _may_create(server, name))
    return server.token(name)


def _may_create(server: ApiOnly, account: str) -> bool:
    answer = server.send("POST", f"{PODS}?dryRun=All", {}, token=server.token(account))
    return answer.code != 403 or "are yours" in answer.message


def bind(server: ApiOnly, subject: Json, kind: str, role: str, namespace: str) -> None:
    """Cluster-wide without a namespace."""
    if subject["kind"] == "User":
        subject = {**subject, "apiGroup": "rbac.authorization.k8s.io"}
    place = f"namespaces/{namespace}/rolebindings" if namespace else "clusterrolebindings"
    body = {
        "metadata": {"name": f"{subject['name']}-{kind.lower()}-{role.rpartition(':')[2]}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [subject],
    }
    server.api.create(f"{RBAC}/{place}", body)


def add_pods(server: ApiOnly) -> None:
    """The agent's, and shop/web; no kubelet runs, so their states are written here."""
    daemonset = server.api.get(f"{IN_PODGATE['DaemonSet']}/podgate")
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True}
    arguments = [f"--metrics-address=$(HOST_IP):{PORT}"]
    agent: Json = {
        "metadata": {
            "name": "podgate-node1",
            "labels": {"app.kubernetes.io/name": "podgate"},
            "ownerReferences": [{**owner, "name": "podgate", "uid": daemonset["metadata"]["uid"]}],
        },
        "spec": {
            **{"nodeName": "node1", "hostNetwork": True, "serviceAccountName": "podgate"},
            "containers": [{"name": "agent", "image": "podgate", "args": arguments}],
        },
    }
    web: Json = {
        "metadata": {"name": "web"},
        "spec": {"nodeName": "node1", "containers": [{"name": "web", "image": "web"}]},
    }
    running = {
        **{"phase": "Running", "podIP": str(NODE_IPV4), "podIPs": [{"ip": str(NODE_IPV4)}]},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    for namespace, pod in (("podgate", agent), ("shop", web)):
        path = f"/api/v1/namespaces/{namespace}/pods"
        server.api.create(path, pod)
        server.api.patch(f"{path}/{pod['metadata']['name']}/status", {"status": running})


@contextlib.asynccontextmanager
async def agent(server: ApiOnly) -> AsyncIterator[None]:
    """At the node's address, with the agent's own rights."""
    api = await ApiClient.open(str(server.kubeconfig("podgate")))
    with socket.create_server((str(NODE_IPV4), PORT)) as listening:
        reading = Reading(Agent(), api, explain_pod=explain)
        made = RemoteMetrics(Agent(), api, (listening,), None, reading=reading)
        serving = asyncio.create_task(made.run())
        yield
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    await api.aclose()


Plugin = Callable[..., Awaitable[tuple[int, str, str]]]


def plugin(
    server: ApiOnly, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Plugin:
    """Runs the plugin as a user: exit status, standard output and standard error."""
    command = shutil.which("kubectl")
    assert command, "kubectl is not installed; put it into PATH"
    directory = server.control_plane.kubeconfig("admin").parent
    monkeypatch.setenv("HOME", str(directory))

    async def run(user: str, *arguments: str) -> tuple[int, str, str]:
        kubeconfig = server.control_plane.kubeconfig(user)
        options = ["--kubectl", command, "--kubeconfig", str(kubeconfig), "--timeout=30"]
        capsys.readouterr()
        status = await asyncio.to_thread(main.main, [*options, *arguments])
        return status, *capsys.readouterr()

    return run

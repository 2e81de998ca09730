"""podgate in the cluster: deploy/manifests as they are, and the agent that they start."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Sequence

import msgspec

from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus, RulesReport
from agent.errors import AgentRequestError
from agent.settings import admin_socket
from tests import polling
from tests.chart import rendering
from tests.cluster.api import Api, Json
from tests.image import manifests
from tests.image.node import RUN_DIRECTORY

NAMESPACE = "podgate"
_DAEMON_SET = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/podgate"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Service": f"/api/v1/namespaces/{NAMESPACE}/services",
    "ValidatingAdmissionPolicy": f"{_ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{_ADMISSION}/validatingadmissionpolicybindings",
    "MutatingAdmissionPolicy": f"{_ADMISSION}/mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": f"{_ADMISSION}/mutatingadmissionpolicybindings",
    "MutatingWebhookConfiguration": f"{_ADMISSION}/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": f"{_ADMISSION}/validatingwebhookconfigurations",
    "Job": f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
    "NetworkPolicy": f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
    "DaemonSet": f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets",
    "Deployment": f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
    "Secret": f"/api/v1/namespaces/{NAMESPACE}/secrets",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "ResourceQuota": f"/api/v1/namespaces/{NAMESPACE}/resourcequotas",
    "PodDisruptionBudget": f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets",
}


class Deployment:
    """podgate's objects in a cluster, and the agent of one node."""

    def __init__(self, api: Api, run_directory: pathlib.Path = RUN_DIRECTORY) -> None:
        """run_directory: of the agent, as this process sees it."""
        self._api = api
        self._run_directory = run_directory

    def apply(self) -> None:
        """Create all objects of the manifests, in the order of the kustomization."""
        for thing in manifests.applied():
            self._api.create(PATHS[thing["kind"]], thing)

    def install(self, helm: str, kubeconfig: pathlib.Path, values: Json | None = None) -> None:
        """As `apply`, by Helm and the chart; or an upgrade. values: others than the chart's."""
        command = [helm, "upgrade", "--install", "podgate", str(rendering.CHART)]
        named = [f"--kubeconfig={kubeconfig}", "--namespace", NAMESPACE, "--create-namespace"]
        subprocess.run(
            [*command, *named, "--values=-"],
            input=json.dumps(values or {}),
            text=True,
            check=True,
            timeout=300,
        )

    def remove(self, helm: str, kubeconfig: pathlib.Path) -> None:
        """Helm's own record, once all else is removed."""
        command = [helm, "uninstall", "podgate", f"--kubeconfig={kubeconfig}"]
        subprocess.run([*command, f"--namespace={NAMESPACE}"], check=True, timeout=300)

    def apply_chart(self, values: Json) -> None:
        """Create or change all objects that the chart has with these values, as `helm upgrade
        --install`; objects of others are not changed."""
        things = rendering.objects(values, service="kubectl")
        kinds = list(PATHS)
        for thing in sorted(things, key=lambda one: kinds.index(one["kind"])):
            self._api.apply(f"{PATHS[thing['kind']]}/{thing['metadata']['name']}", thing)

    def wait_until_ready(self, seconds: float = 180) -> None:
        """The roll-out is complete, and the agent that has the node responds."""
        try:
            polling.wait_until("the DaemonSet is rolled out", self._is_rolled_out, seconds=seconds)
        except polling.TimedOutError as error:
            raise AssertionError(f"{error}; {self.explain()}") from error
        polling.wait_until("the agent responds", self.report)

    def wait_until_available(self) -> None:
        """Its pods have been ready for minReadySeconds.

        The controller's timer for a pod that becomes ready is lost if it has an earlier one: it
        adds the DaemonSet to a queue that keeps the first time (client-go, util/workqueue).
        """
        polling.wait_until("the DaemonSet is available", self._is_available, seconds=180)

    def set_arguments(
        self, arguments: Sequence[str], *, directories: Sequence[pathlib.Path] = ()
    ) -> None:
        """Roll out the manifests' arguments with more behind them; none: the manifests' alone.

        directories: of the node, which the agent gets at the same paths, to write to.
        """
        self.start_roll_out(arguments, directories=directories)
        self.wait_until_ready()

    def start_roll_out(
        self,
        arguments: Sequence[str],
        *,
        directories: Sequence[pathlib.Path] = (),
        command: Sequence[str] = (),
    ) -> None:
        """As `set_arguments`, without waiting for its end. command: instead of `podgate`.

        The previous roll-out is unfinished, or its pods are available: before that it would
        let this one wait without end, see `wait_until_available`.
        """
        self.wait_until_available()
        spec = manifests.agent_pod("any")["spec"]
        (container,) = spec["containers"]
        container["args"] += arguments
        if command:
            container["command"] = list(command)
        for number, path in enumerate(directories):
            name = f"more-{number}"
            spec["volumes"].append({"name": name, "hostPath": {"path": str(path)}})
            container["volumeMounts"].append({"name": name, "mountPath": str(path)})
        self._api.patch(_DAEMON_SET, {"spec": {"template": {"spec": spec}}})

    def pods(self) -> list[Json]:
        """Of the DaemonSet."""
        return self._api.items(_PODS, labelSelector="app.kubernetes.io/name=podgate")

    def restarts(self) -> int:
        """Of the containers of all its pods."""
        statuses = [one for pod in self.pods() for one in pod["status"]["containerStatuses"]]
        return sum(one["restartCount"] for one in statuses)

    def log(self) -> str:
        """Of the newest pod's container."""
        newest = max(self.pods(), key=lambda pod: pod["metadata"]["creationTimestamp"])
        return self._api.text(f"{_PODS}/{newest['metadata']['name']}/log")

    def explain(self) -> str:
        """Its pods as the API has them, and the end of the newest one's log."""
        statuses = [(pod["metadata"]["name"], pod["status"]) for pod in self.pods()]
        return f"its pods are {statuses}, and the newest one's log ends with {self.log()[-3000:]}"

    def report(self) -> AgentReport | None:
        """Of the agent that has the node; None while none responds."""
        with contextlib.suppress(AgentRequestError):
            content = asyncio.run(admin_client.fetch(admin_socket(self._run_directory), "/status"))
            return msgspec.json.decode(content, type=AgentReport)
        return None

    def metrics(self) -> str:
        """Of the agent that has the node, as Prometheus reads them."""
        with urllib.request.urlopen("http://127.0.0.1:9650/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def rules(self) -> RulesReport:
        """As `podgate rules` shows them."""
        content = asyncio.run(admin_client.fetch(admin_socket(self._run_directory), "/rules"))
        return msgspec.json.decode(content, type=RulesReport)

    def pod_status(self, namespace: str, name: str) -> PodStatus | None:
        """A pod as the agent reports it."""
        report = self.report()
        found = [pod for pod in (report.pods if report else ()) if pod.name == name]
        return next((pod for pod in found if pod.namespace == namespace), None)

    def until(self, what: str, holds: Callable[[AgentReport], object]) -> AgentReport:
        """Wait until a report has it, and return that."""

        def check() -> AgentReport | None:
            report = self.report()
            return report if report is not None and holds(report) else None

        found = polling.wait_until(what, check)
        assert found is not None
        return found

    def kill_agent(self) -> int:
        """End the agent's process at once; its process id."""
        report = polling.wait_until("the agent responds", self.report)
        assert report is not None
        os.kill(report.pid, signal.SIGKILL)
        return report.pid

    def _is_available(self) -> bool:
        status = self._api.get(_DAEMON_SET).get("status", {})
        desired = status.get("desiredNumberScheduled", 0)
        return bool(desired > 0 and status.get("numberAvailable") == desired)

    def _is_rolled_out(self) -> bool:
        found = self._api.get(_DAEMON_SET)
        status = found.get("status", {})
        desired = status.get("desiredNumberScheduled", 0)
        return bool(
            status.get("observedGeneration") == found["metadata"]["generation"]
            and desired > 0
            and status.get("updatedNumberScheduled") == desired
            and status.get("numberReady") == desired
            and len(self.pods()) == desired
        )

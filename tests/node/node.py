"""One node of a cluster, in the test's hands: API server, container runtime, agent."""

import asyncio
import contextlib
import copy
import json
import pathlib
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec

from agent import labels as agent_labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus, RulesReport
from agent.errors import AgentRequestError
from agent.lab import agent_process
from agent.lab.agent_process import AgentProcess
from agent.settings import admin_socket
from tests import polling
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer, Json, RecordedRequest
from tests.runtime.containerd import Containerd
from tests.runtime.driving import Driver

NAME = "node1"
NAMESPACE = "tests"
PORT = 8080
READY = {
    "readinessProbe": {
        "httpGet": {"path": "/healthz", "port": PORT},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
}


class Node:
    """Pods are the test's to make in the API and in the runtime, as scheduler and kubelet do."""

    def __init__(
        self,
        runtime: Containerd,
        driver: Driver,
        server: ApiServer,
        operator: AgentProcess,
    ) -> None:
        self.runtime = runtime
        self.driver = driver
        self.server = server
        self.operator = operator
        self.kubeconfig = operator.log.with_name("kubeconfig")
        self._api = contextlib.AsyncExitStack()
        operator.pods_from = (
            *("--node-name", NAME, "--kubeconfig", str(self.kubeconfig)),
            *("--cri-socket", str(runtime.socket)),
        )
        metadata = {"metadata": {"name": NAME}}
        server.put({"kind": "Node", **metadata}, path=NODES)
        self.label_namespace({})

    async def start_api(self) -> None:
        """Serve at the address that it had before, if it had one."""
        await self._api.enter_async_context(self.server.running(port=self.server.port))

    async def stop_api(self) -> None:
        """Stop listening; the server's objects stay."""
        await self._api.aclose()

    def create(
        self, name: str, *, container: Json = READY, is_gated: bool = True, **metadata: Any
    ) -> Json:
        """Have the API know a pod. container: fields of its only one; is_gated: whether it has
        both of podgate's readiness gates."""
        make = apiserver.gated if is_gated else apiserver.pod
        thing = make(name, namespace=NAMESPACE, **metadata)
        thing["spec"]["containers"][0].update(copy.deepcopy(container))
        return self.server.put(thing)

    def delete(self, name: str) -> None:
        self.server.delete(name, namespace=NAMESPACE)

    def change(self, name: str, edit: Callable[[Json], object]) -> None:
        """Another version of a pod in the API."""
        thing = copy.deepcopy(self.get(name))
        edit(thing)
        self.server.put(thing)

    def label_namespace(self, labels: dict[str, str]) -> None:
        """The namespace that all pods are in."""
        metadata = {"metadata": {"name": NAMESPACE, "labels": labels}}
        self.server.put({"kind": "Namespace", **metadata}, path=NAMESPACES)

    def get(self, name: str) -> Json:
        return self.server.get(name, namespace=NAMESPACE)

    def condition(self, name: str, kind: str) -> Json:
        """As the API has it; empty while it does not."""
        found = self.get(name)["status"].get("conditions", ())
        return next((one for one in found if one["type"] == kind), {})

    def is_ready(self, name: str) -> bool:
        """Whether both of podgate's conditions are True in the API."""
        return all(
            self.condition(name, kind).get("status") == "True"
            for kind in (agent_labels.ISOLATION_READY, agent_labels.PROBES_PASSING)
        )

    def patches(self, name: str) -> list[RecordedRequest]:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"
        return self.server.of(path, method="PATCH")

    def events(self) -> list[Json]:
        """Bodies of the Events that were made."""
        path = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"
        return [one.body for one in self.server.of(path, method="POST")]

    async def run_pod(self, name: str, *, attempt: int = 0) -> str:
        """Its sandbox and its container; the sandbox' id."""
        sandbox = await self.driver.run_sandbox(name, attempt=attempt)
        await self.driver.start_container(sandbox, attempt=attempt)
        return sandbox

    async def end_pod(self, sandbox: str) -> None:
        await self.driver.stop_sandbox(sandbox)
        await self.driver.remove_sandbox(sandbox)

    async def start_agent(self, *options: str) -> None:
        """Start it, and wait until it answers."""
        self.operator.start("--mode", "enforce", *options)
        await self.report("an agent", lambda report: True)

    async def stop_agent(self, number: signal.Signals = signal.SIGTERM) -> None:
        await asyncio.to_thread(self.operator.stop, number)

    async def install_plugin(self, binary: pathlib.Path, *options: str) -> None:
        """Add podgate-cni to the runtime's network, as `podgate cni install` does by hand."""
        done = await asyncio.to_thread(
            self.operator.run,
            *("cni", "install", "--binary", str(binary), *options),
            *("--cni-conf-dir", str(self.runtime.cni_directory)),
            *("--cni-bin-dir", str(self.runtime.plugins)),
            *("--run-directory", str(self.operator.run_directory)),
            *("--bpffs", str(self.operator.bpffs)),
        )
        assert done.returncode == 0, done.stderr
        # It reads its network when it starts; otherwise some time later.
        self.runtime.stop()
        self.runtime.start()

    async def report(self, what: str, holds: Callable[[AgentReport], object]) -> AgentReport:
        """Poll the agent's report until it holds."""
        return await asyncio.to_thread(
            self.operator.wait_for, what, lambda report: bool(holds(report))
        )

    async def rules(self, what: str, holds: Callable[[RulesReport], object]) -> RulesReport:
        """Poll the report of `podgate rules` until it holds."""
        path = admin_socket(self.operator.run_directory)

        async def request() -> RulesReport:
            return msgspec.json.decode(await admin_client.fetch(path, "/rules"), type=RulesReport)

        return await polling.request_until(what, request, holds)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until something holds of the API server or of the kernel."""
        try:
            await polling.until(what, holds)
        except polling.TimedOutError as error:
            report = await asyncio.to_thread(self.operator.report)
            state = [one.sentence for one in report.findings] if report else "none, it hangs"
            lines = [json.dumps(line) for line in self.operator.log_lines()][-5:]
            path, stacks = admin_socket(self.operator.run_directory), ""
            with contextlib.suppress(AgentRequestError):
                stacks = (await admin_client.fetch(path, "/stacks")).decode()
            raise polling.TimedOutError(
                f"{error}; the agent's findings: {state}; its last lines: {lines}; its tasks and "
                f"threads:\n{stacks}"
            ) from error

    async def ready(self, *pods: str) -> None:
        """Wait until both conditions of each are True in the API."""
        await self.until(f"{pods} ready", lambda: all(self.is_ready(name) for name in pods))

    async def saved(self, *pods: str) -> None:
        """Until the agent's saved state has the pods as the API has them."""
        path = self.operator.run_directory / "state" / "pods.json"

        def is_saved() -> bool:
            known = json.loads(path.read_text())["pods"] if path.exists() else []
            versions = {one["metadata"]["name"]: version(one) for one in known}
            return all(versions.get(name) == version(self.get(name)) for name in pods)

        await self.until("saved pods", is_saved)

    async def get_http(self, path: str) -> tuple[int, str]:
        """Status and text of the agent's own server."""
        report = await self.report("an agent", lambda report: True)
        url = f"http://{report.http_address}{path}"

        def request() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(url, timeout=polling.PATIENCE_SECONDS) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        return await asyncio.to_thread(request)

    async def serves(self, path: str, code: int) -> str:
        """Wait until the agent's own server answers with this status; the text."""
        _, text = await polling.request_until(
            f"{code} of {path}", lambda: self.get_http(path), lambda answer: answer[0] == code
        )
        return text


def version(thing: Json) -> str:
    return str(thing["metadata"]["resourceVersion"])


def status_of(report: AgentReport, name: str) -> PodStatus:
    found = agent_process.pod_of(report, name)
    assert found is not None, f"{name} is not among {[pod.name for pod in report.pods]}"
    return found


def reason_of(report: AgentReport, name: str, kind: str = agent_labels.ISOLATION_READY) -> str:
    """Empty if the agent reports none."""
    found = agent_process.condition_of(report, name, kind)
    return found.reason if found else ""

"""What the cluster tests do in a cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agent.kube.client import ApiClient, ApiError
from agent.kube.objects import ApiPod
from agent.kube.watcher import Query, Watcher
from tests import polling

# Clusters of continuous integration are slow; a test that has what it waits for is not.
PATIENCE_SECONDS = 60.0
GATES = ("podgate.io/isolation-ready", "podgate.io/probes-passing")


class Cluster:
    """One namespace of a cluster, and a node to put pods on."""

    def __init__(self, api: ApiClient, namespace: str, node_name: str) -> None:
        self.api = api
        self.namespace = namespace
        self.node_name = node_name

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def wait_for_service_account(self) -> None:
        """Pods are rejected until the namespace has its default one."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await self.api.request("GET", path)
                except ApiError as error:
                    if error.code != 404:
                        raise
                    await asyncio.sleep(0.2)
                else:
                    return

    async def make_pod(self, name: str) -> Any:
        """A gated pod; whether its image can be had does not matter."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": {"test": name}},
            "spec": {
                "nodeName": self.node_name,
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "readinessGates": [{"conditionType": gate} for gate in GATES],
                "containers": [{"name": "app", "image": "registry.k8s.io/pause:3.10"}],
            },
        }
        return json.loads(await self.api.request("POST", self.pods_path, body=body))

    async def pod(self, name: str) -> Any:
        return json.loads(await self.api.request("GET", f"{self.pods_path}/{name}"))

    async def delete_pod(self, name: str) -> None:
        query = {"gracePeriodSeconds": "0"}
        await self.api.request("DELETE", f"{self.pods_path}/{name}", query=query)

    def watcher(self, on_change: Callable[[ApiPod | None, ApiPod | None], None]) -> Watcher[ApiPod]:
        """Of this namespace's pods on this node."""
        query = Query("pods", self.pods_path, ApiPod, f"spec.nodeName={self.node_name}")
        return Watcher(self.api, query, on_change=on_change)

    def find(self, watcher: Watcher[ApiPod], name: str) -> ApiPod | None:
        return watcher.objects.get((self.namespace, name))


async def until(holds: Callable[[], object]) -> None:
    await polling.until("the cluster has the state", holds)


@asynccontextmanager
async def running(*tasks: Any) -> AsyncIterator[None]:
    """Coroutines that run meanwhile."""
    started = [asyncio.create_task(task) for task in tasks]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)

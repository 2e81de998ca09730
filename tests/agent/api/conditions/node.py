"""A node whose agent keeps others' conditions in step with an API server, over real sockets."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import yaml

from agent.api.conditions import sockets
from agent.api.conditions.service import ConditionsService
from agent.kube.client import ApiClient
from agent.kube.condition_writer import ConditionWriter
from agent.kube.objects import ApiPod
from agent.kube.watcher import Query, Watcher
from agent.pods.changes import Changes
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from tests import polling
from tests.agent.kube.apiserver import PODS, ApiServer

OWNERS = "/apis/podgate.io/v1alpha1/conditionowners"
BOOT = "5be0b7e0-0000-4000-8000-000000000001"


def owner(domain: str, *reporters: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A ConditionOwner."""
    return {
        "apiVersion": "podgate.io/v1alpha1",
        "kind": "ConditionOwner",
        "metadata": {"name": domain, "uid": f"uid-{domain}", "generation": 1},
        "spec": {"reporters": list(reporters), **spec},
    }


class _Pods:
    """The API's pods, as agent.kube.node_pods has them."""

    def __init__(self) -> None:
        self.objects: dict[str, ApiPod] = {}

    @property
    def uids(self) -> set[str]:
        return set(self.objects)

    def get(self, uid: str) -> ApiPod | None:
        return self.objects.get(uid)


class Life:
    """One life of the agent, from its start to its end."""

    def __init__(self, node: "Node", boot: str) -> None:
        self._node = node
        self.store = PodStore(Conditions())
        self.pods = _Pods()
        self.sandbox_changes = Changes()
        files = node.directory / "owners.yaml"
        self.service = ConditionsService(
            node.directory / "run",
            api=node.api,
            files=files if files.exists() else None,
            store=self.store,
            pods=self.pods,  # type: ignore[arg-type]  # what it reads of them
            sandbox_of=self._sandbox_of,
            sandbox_changes=self.sandbox_changes,
            unready_because=lambda: None,
            boot=boot,
        )
        self.writer = ConditionWriter(
            node.api,
            conditions_of=self.store.conditions.of,
            sandbox_of=self._sandbox_of,
            boot=boot,
            is_withdrawn=self.service.owned.is_withdrawn,
            jitter=lambda: 0.0,
        )
        self._watcher = Watcher(
            node.api, Query("pods", PODS, ApiPod), on_change=self._on_pod, jitter=lambda: 0.0
        )
        self._conditions = self.store.conditions.changes.subscribe()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Life"]:
        running = [
            asyncio.create_task(run())
            for run in (self._watcher.run, self.writer.run, self.service.run, self._follow)
        ]
        try:
            if self._node.is_api_up:
                await self._watcher.synced.wait()
                await polling.until("the owners", lambda: self.service.owned.owners is not None)
            self.store.synced.set()
            await polling.until("the socket", self._node.socket.exists)
            yield self
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def set_sandbox(self, uid: str, sandbox: str) -> None:
        """The runtime has another sandbox of this pod."""
        self._node.sandboxes[uid] = sandbox
        self.sandbox_changes.mark(uid)

    def _sandbox_of(self, uid: str) -> str:
        return self._node.sandboxes.get(uid, "sandbox-1")

    def _on_pod(self, old: ApiPod | None, new: ApiPod | None) -> None:
        if new is None:
            assert old is not None
            del self.pods.objects[old.uid]
            self.store.remove_pod(old.uid)
            self.writer.forget(old.uid)
            return
        self.pods.objects[new.uid] = new
        if old is None:
            metadata = new.metadata
            self.store.set_pod(Pod(uid=new.uid, namespace=metadata.namespace, name=metadata.name))
        self.service.see_api(new)
        self.writer.set_pod(new)

    async def _follow(self) -> None:
        while True:
            for uid in await self._conditions.next():
                self.writer.enqueue(uid)


class Node:
    """What outlives the agent: directory, API server, sandboxes."""

    def __init__(self, directory: pathlib.Path, server: ApiServer, api: ApiClient) -> None:
        self.directory = directory
        self.server = server
        self.api = api
        self.sandboxes: dict[str, str] = {}
        self.is_api_up = True

    @property
    def socket(self) -> pathlib.Path:
        return sockets.conditions(self.directory / "run")

    @contextlib.asynccontextmanager
    async def agent(self, boot: str = BOOT) -> AsyncIterator[Life]:
        """One life of the agent."""
        async with Life(self, boot).running() as life:
            yield life

    def register(self, *owners: dict[str, Any]) -> None:
        for one in owners:
            self.server.put(one, path=OWNERS)

    def write_owners(self, *owners: dict[str, Any]) -> None:
        """For a node that reads them from a file."""
        path = self.directory / "owners.yaml"
        path.write_text(yaml.safe_dump_all(owners), encoding="utf-8")

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """A pod's condition in the API; empty if it has none of this type."""
        found = self.server.get(name)["status"].get("conditions", [])
        return next((one for one in found if one["type"] == kind), {})

    def is_written(self, name: str, kind: str, status: str, reason: str) -> bool:
        """Whether the API has this status and reason."""
        found = self.condition(name, kind)
        return (found.get("status"), found.get("reason")) == (status, reason)

    def statuses(self, kind: str) -> list[str]:
        """All that was written of a type, in order."""
        return [
            one["status"]
            for request in self.server.patches()
            for one in request.body["status"]["conditions"]
            if one["type"] == kind and "status" in one
        ]

    def state(self) -> Any:
        """What is saved."""
        return json.loads((self.directory / "run" / "state" / "conditions.json").read_text())

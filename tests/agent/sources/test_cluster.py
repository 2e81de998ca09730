"""A cluster's pods in the store: changes of API server and runtime, read one pass later."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.cri.models import NetworkedSandbox, Sandbox, SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns
from agent.kube.client import ApiClient
from agent.pods.conditions import Conditions
from agent.pods.pod import SANDBOX_MISSING
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import IsolationStatus
from agent.pods.store import PodStore
from agent.policy.api_source import ApiPolicies
from agent.settings import Settings
from agent.sources.cluster import ClusterSource
from bpf.verdicts import Mode
from probes.netns import Netns
from tests import polling
from tests.agent.kube.apiserver import NODES, ApiServer, pod
from tests.agent.kube.conftest import api, kubeconfig, listening, server

__all__ = ["api", "kubeconfig", "listening", "server"]

NODE = "node1"
NETNS = Netns("/run/netns/web", 4, 100)
SANDBOX = Sandbox(
    id="one",
    pod_uid="uid-web",
    pod_name="web",
    pod_namespace="default",
    attempt=0,
    created=None,
    is_ready=True,
    netns=NETNS,
)


class Cluster:
    """A source whose runtime's list the test writes."""

    def __init__(self, api: ApiClient, directory: pathlib.Path) -> None:
        self.store = PodStore(Conditions())
        self.modes = PodModes(Mode.AUDIT, is_complete=False)
        settings = Settings(
            node_name=NODE,
            run_directory=directory,
            cri_socket=directory / "no-runtime.sock",
            nri_socket=directory / "no-nri.sock",
        )
        policies = ApiPolicies(api, state=directory / "policies.json")
        self.source = ClusterSource(api, settings, self.store, policies, self.modes)

        async def relist() -> None: ...

        self.source.sandboxes.relist = relist  # type: ignore[method-assign]

    def set_sandboxes(self, *sandboxes: Sandbox) -> None:
        """As a complete list does."""
        listed = self.source.sandboxes
        uids = {*listed.current, *(sandbox.pod_uid for sandbox in sandboxes)}
        listed.current = {sandbox.pod_uid: sandbox for sandbox in sandboxes}
        listed.relists = 2
        for uid in uids:
            listed.changes.mark(uid)

    def netns_path(self) -> str | None:
        state = self.store.get("uid-web")
        return state.pod.netns_path if state else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Cluster"]:
        self.source.start()
        task = asyncio.create_task(self.source.run())
        try:
            await polling.until("all pods are listed", lambda: self.source.pods.is_synced)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def web(phase: str = "Running") -> Any:
    return {**pod("web"), "status": {"phase": phase}}


@pytest.fixture
async def cluster(
    server: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> AsyncIterator[Cluster]:
    server.put({"metadata": {"name": NODE, "uid": "n"}}, path=NODES)
    server.put(web())
    async with Cluster(api, tmp_path).running() as running:
        yield running


async def test_pod_and_sandbox_are_joined_in_the_store(cluster: Cluster) -> None:
    await polling.until("the pod", lambda: cluster.store.get("uid-web"))
    problem = cluster.store.pods["uid-web"].pod.manifest_problem
    assert problem is not None
    assert problem.reason == SANDBOX_MISSING
    cluster.set_sandboxes(SANDBOX)
    await polling.until("the namespace", lambda: cluster.netns_path() == NETNS.path)


async def test_source_is_not_ready_before_listed_sandboxes_are_in_the_store(
    cluster: Cluster,
) -> None:
    """The reconciler removes gates that no pod of the store claims."""
    cluster.set_sandboxes(SANDBOX)
    assert cluster.source.unready_reason is not None
    await polling.until("all are read", lambda: cluster.source.unready_reason is None)
    assert cluster.netns_path() == NETNS.path


async def test_source_names_what_it_waits_for(api: ApiClient, tmp_path: pathlib.Path) -> None:
    source = Cluster(api, tmp_path).source
    found = [source.unready_reason]
    source.pods.pods.problem = "Forbidden"
    found.append(source.unready_reason)
    source.pods.pods.synced.set()
    source.pods._has_modes = True
    found.append(source.unready_reason)
    source.kubelet_pods.answered.set()
    source.sandboxes.problem = "connection refused"
    found.append(source.unready_reason)
    assert found == [
        "API server has not listed the pods yet",
        "Forbidden",
        "kubelet has not listed its pods yet",
        "connection refused",
    ]


async def test_pod_whose_containers_are_done_stays_while_its_sandbox_does(
    cluster: Cluster, server: ApiServer
) -> None:
    cluster.set_sandboxes(SANDBOX)
    await polling.until("the namespace", lambda: cluster.netns_path() == NETNS.path)
    server.put(web("Succeeded"))
    await polling.until("it is done", lambda: cluster.source.has_ended("uid-web"))
    await asyncio.sleep(0)
    assert cluster.netns_path() == NETNS.path
    cluster.set_sandboxes()
    await polling.until("it is gone", lambda: cluster.store.get("uid-web") is None)


async def test_each_change_is_passed_on(cluster: Cluster, server: ApiServer) -> None:
    """Conditions and probes follow object, sandbox and containers."""
    changed = cluster.source.changes.subscribe()
    cluster.set_sandboxes(SANDBOX)
    assert await changed.next() == ["uid-web"]
    cluster.source.sandboxes.changes.mark("uid-web")  # a container
    assert await changed.next() == ["uid-web"]
    server.delete("web")
    assert await changed.next() == ["uid-web"]
    assert cluster.netns_path() == NETNS.path


@pytest.mark.parametrize(
    ("changes", "is_awaited"),
    [({}, True), ({"hostNetwork": True}, False)],
)
async def test_sandbox_is_awaited_for_a_pod_with_a_network_of_its_own(
    server: ApiServer,
    api: ApiClient,
    tmp_path: pathlib.Path,
    changes: dict[str, Any],
    *,
    is_awaited: bool,
) -> None:
    made = web()
    made["spec"] |= changes
    server.put({"metadata": {"name": NODE, "uid": "n"}}, path=NODES)
    server.put(made)
    async with Cluster(api, tmp_path).running() as running:
        await polling.until("the pod", lambda: running.store.get("uid-web"))
        assert running.source._awaits_sandbox() is is_awaited
        running.set_sandboxes(SANDBOX)
        assert not running.source._awaits_sandbox()


async def test_ceiling_of_the_node_is_followed(cluster: Cluster) -> None:
    def mode() -> Mode | None:
        state = cluster.store.get("uid-web")
        return state.pod.mode if state else None

    cluster.set_sandboxes(SANDBOX)
    await polling.until("its mode", lambda: mode() is Mode.AUDIT)
    cluster.modes.set_off(is_off=True)
    await polling.until("the ceiling", lambda: mode() is Mode.OFF)
    cluster.modes.set_off(is_off=False)
    await polling.until("the mode before", lambda: mode() is Mode.AUDIT)


NEW = NetworkedSandbox(
    Sandbox(
        id="two",
        pod_uid="uid-web",
        pod_name="web",
        pod_namespace="default",
        attempt=0,
        created=None,
        is_ready=False,
    ),
    "/run/netns/new",
)
NEW_NETNS = Netns("/run/netns/new", 4, 200)


@pytest.fixture
async def starting(cluster: Cluster) -> AsyncIterator[asyncio.Task[bool]]:
    """The runtime starts another sandbox of the pod, which waits for its gate."""

    async def locate(details: SandboxDetails) -> SandboxNetns:
        return SandboxNetns(NEW_NETNS)

    await polling.until("the pod", lambda: cluster.store.get("uid-web"))
    cluster.set_sandboxes(SANDBOX)
    cluster.source.sandboxes._locate = locate
    task = asyncio.create_task(cluster.source.gate_new(NEW))
    await polling.until("the namespace", lambda: cluster.netns_path() == NEW_NETNS.path)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sandbox_that_starts_replaces_a_ready_one_and_waits_for_its_gate(
    cluster: Cluster, starting: asyncio.Task[bool]
) -> None:
    state = cluster.store.pods["uid-web"]
    state.gated_netns = NETNS
    cluster.store.in_force.mark("uid-web")
    await asyncio.sleep(0.01)
    assert not starting.done()
    assert cluster.store.awaited == {"uid-web"}
    state.gated_netns = NEW_NETNS
    cluster.store.in_force.mark("uid-web")
    assert await starting
    assert not cluster.store.awaited
    assert cluster.store.in_force._subscriptions == []


@pytest.mark.parametrize("reason", ["NoInterface", "GateFailed"])
async def test_sandbox_waits_for_a_gate_that_fails_but_not_for_one_that_cannot_be(
    cluster: Cluster, starting: asyncio.Task[bool], reason: str
) -> None:
    cluster.store.pods["uid-web"].status = IsolationStatus("False", reason, "")
    cluster.store.in_force.mark("uid-web")
    await asyncio.sleep(0.01)
    assert starting.done() == (reason == "NoInterface")
    if starting.done():
        assert not await starting


async def test_sandbox_that_is_gone_again_waits_no_longer(
    cluster: Cluster, starting: asyncio.Task[bool]
) -> None:
    cluster.set_sandboxes()
    cluster.store.in_force.mark("uid-web")
    assert not await starting

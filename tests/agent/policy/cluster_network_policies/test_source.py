"""ClusterNetworkPolicies of an API server, and what follows for modes."""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
from aiohttp import web

from agent.kube.client import ApiClient
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_modes import NODE, PodModes
from agent.policy.cluster_network_policies.evaluation import Ingress
from agent.policy.cluster_network_policies.source import (
    NETWORK_POLICIES,
    POLICIES,
    ClusterNetworkPolicies,
)
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.blocking import may_block

__all__ = ["api", "kubeconfig", "listening", "server"]

pytestmark = pytest.mark.looptime

DENY_ALL = [{"action": "Deny", "from": [{"namespaces": {}}]}]
OF_SHOP = {"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}


class Followed:
    """The policies of a node with mode audit, as the agent follows them."""

    @may_block("the agent restores at its start")
    def __init__(self, api: ApiClient, state: pathlib.Path) -> None:
        self.modes = PodModes(Mode.AUDIT)
        self.labels = ObjectLabels()
        self.changed = self.modes.changes.subscribe()
        self.source = ClusterNetworkPolicies(
            api,
            state=state,
            labels=self.labels,
            modes=self.modes,
            closes=True,
            jitter=lambda: 0.5,
        )
        self.modes.closures = self.source
        self.source.restore()

    def mode(self, namespace: str = "shop", **labels: str) -> tuple[str, str]:
        found = self.modes.of_pod("u1", namespace, labels)
        return found.mode.label, found.origin

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Followed"]:
        task = asyncio.create_task(self.source.run())
        try:
            await asyncio.sleep(1)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "clusternetworkpolicies.json"


def put(server: ApiServer, name: str = "deny-all", **changes: Any) -> None:
    spec = {"tier": "Admin", "priority": 1, "subject": OF_SHOP, "ingress": DENY_ALL, **changes}
    server.put({"metadata": {"name": name, "uid": name}, "spec": spec}, path=POLICIES.path)


async def test_pods_are_closed_while_the_policy_exists(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Followed(api, state).running() as seen:
        assert seen.mode() == ("audit", "")
        seen.changed.take()
        put(server)
        await asyncio.sleep(1)
        assert seen.changed.take() == [NODE]
        assert seen.mode() == ("enforce", "ClusterNetworkPolicy deny-all")
        assert seen.mode("other") == ("audit", "")
        hosted = seen.modes.of_pod("u2", "shop", {}, host_network=True)
        assert (hosted.mode, hosted.problems) == (Mode.AUDIT, ())
        server.delete("deny-all", namespace="", path=POLICIES.path)
        await asyncio.sleep(1)
        assert seen.changed.take() == [NODE]
        assert seen.mode() == ("audit", "")


async def test_new_pods_of_its_namespaces_are_closed_from_the_start(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server)
    async with Followed(api, state).running() as seen:
        seen.labels.set_namespace("shop", {"kubernetes.io/metadata.name": "shop"})
        assert seen.modes.of_new_pods.namespaces == {"shop": Mode.ENFORCE}
        assert seen.modes.default.label == "audit"
        put(server, subject={"namespaces": {}})
        await asyncio.sleep(1)
        assert seen.modes.default.label == "enforce"


async def test_network_policy_precedes_the_baseline_tier(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, tier="Baseline")
    async with Followed(api, state).running() as seen:
        assert seen.mode(app="web")[0] == "enforce"
        seen.changed.take()
        spec = {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}
        metadata = {"name": "web", "namespace": "shop", "uid": "np"}
        server.put({"metadata": metadata, "spec": spec}, path=NETWORK_POLICIES.path)
        await asyncio.sleep(1)
        assert seen.changed.take() == ["shop"]
        assert seen.mode(app="web")[0] == "audit"
        assert seen.mode(app="db")[0] == "enforce"
        server.put(
            {"metadata": metadata | {"labels": {"seen": "today"}}, "spec": spec},
            path=NETWORK_POLICIES.path,
        )
        await asyncio.sleep(1)
        assert seen.changed.take() == []
        spec = {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"]}
        server.put({"metadata": metadata, "spec": spec}, path=NETWORK_POLICIES.path)
        await asyncio.sleep(1)
        assert seen.changed.take() == ["shop"]
        assert seen.mode(app="web")[0] == "enforce"
        assert seen.mode(app="db")[0] == "audit"
        server.delete("web", namespace="shop", path=NETWORK_POLICIES.path)
        await asyncio.sleep(1)
        assert seen.mode(app="db")[0] == "enforce"


async def test_label_of_a_namespace_selects_its_pods(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, subject={"namespaces": {"matchLabels": {"closed": "yes"}}})
    async with Followed(api, state).running() as seen:
        assert seen.mode()[0] == "audit"
        seen.labels.set_namespace("shop", {"closed": "yes"})
        assert seen.modes.set_namespace("shop", {"closed": "yes"})
        assert seen.mode()[0] == "enforce"


async def test_object_that_is_not_understood_is_a_problem_and_closes_nothing(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, ingress=[{"action": "Deny", "from": [{"nodes": {}}]}])
    async with Followed(api, state).running() as seen:
        assert seen.mode()[0] == "audit"
        [problem] = seen.source.problems
        start = "ClusterNetworkPolicy deny-all is not understood, and not evaluated: "
        assert problem.startswith(start)
        assert "`nodes`" in problem
        put(server)
        await asyncio.sleep(1)
        assert (seen.source.problems, seen.mode()[0]) == ([], "enforce")


async def test_saved_policies_hold_while_the_api_server_is_away(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, tier="Baseline")
    async with Followed(api, state).running() as seen:
        await asyncio.sleep(5)
        assert seen.mode()[0] == "enforce"
    server.delete("deny-all", namespace="", path=POLICIES.path)

    async def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    server.faults.append(away)
    async with Followed(api, state).running() as seen:
        assert seen.source.is_settled
        assert seen.modes.kept_up_to("shop") is Mode.OFF
        assert seen.mode()[0] == "enforce"
        server.faults.clear()
        await asyncio.sleep(60)
        assert seen.mode()[0] == "audit"


def put_network_policy(server: ApiServer, name: str, **selector: Any) -> None:
    metadata = {"name": name, "namespace": "shop", "uid": name}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"]}
    server.put({"metadata": metadata, "spec": spec}, path=NETWORK_POLICIES.path)


async def test_pod_whose_labels_are_unknown_may_be_one_that_a_network_policy_selects(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, tier="Baseline")
    async with Followed(api, state).running() as seen:
        decide = seen.source.decide
        assert decide("shop", None).ingress is Ingress.DENIED
        put_network_policy(server, "web", matchLabels={"app": "web"})
        await asyncio.sleep(1)
        assert decide("shop", None).ingress is Ingress.UNKNOWN
        assert decide("shop", {}).ingress is Ingress.DENIED
        put_network_policy(server, "all")
        await asyncio.sleep(1)
        assert decide("shop", None).ingress is Ingress.BY_NETWORK_POLICY
        assert decide("shop", {}).ingress is Ingress.BY_NETWORK_POLICY
        server.delete("all", namespace="shop", path=NETWORK_POLICIES.path)
        await asyncio.sleep(1)
        assert decide("shop", None).ingress is Ingress.UNKNOWN


@pytest.mark.parametrize(
    ("types", "ingress"),
    [
        (["Egress"], Ingress.DENIED),
        (["Egress", "Ingress"], Ingress.BY_NETWORK_POLICY),
        (None, Ingress.BY_NETWORK_POLICY),
    ],
)
async def test_network_policy_counts_if_it_is_for_ingress(
    server: ApiServer,
    api: ApiClient,
    state: pathlib.Path,
    types: list[str] | None,
    ingress: Ingress,
) -> None:
    put(server, tier="Baseline")
    metadata = {"name": "all", "namespace": "shop", "uid": "all"}
    spec: dict[str, Any] = {"podSelector": {}, "policyTypes": types}
    server.put({"metadata": metadata, "spec": spec}, path=NETWORK_POLICIES.path)
    async with Followed(api, state).running() as seen:
        assert seen.source.decide("shop", {}).ingress is ingress


async def test_baseline_closes_once_network_policies_may_be_read(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.forbid(NETWORK_POLICIES.path)
    put(server, tier="Baseline")
    async with Followed(api, state).running() as seen:
        assert seen.source.is_settled
        assert seen.mode()[0] == "audit"
        seen.changed.take()
        server.faults.clear()
        await asyncio.sleep(120)
        assert seen.changed.take() == [NODE]
        assert seen.mode()[0] == "enforce"


async def test_what_was_last_read_is_saved(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Followed(api, state).running():
        await asyncio.sleep(5)
        put_network_policy(server, "web", matchLabels={"app": "web"})
        await asyncio.sleep(5)
        before = await asyncio.to_thread(state.read_bytes)
        put(server, tier="Baseline")
        await asyncio.sleep(5)
        after = await asyncio.to_thread(state.read_bytes)
    assert (b'"web"' in before, b'"deny-all"' in before) == (True, False)
    assert (b'"web"' in after, b'"deny-all"' in after) == (True, True)


async def test_network_policy_that_was_deleted_meanwhile_is_forgotten(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, tier="Baseline")
    put_network_policy(server, "web", matchLabels={"app": "web"})
    async with Followed(api, state).running() as seen:
        await asyncio.sleep(5)
        assert seen.mode(app="web")[0] == "audit"
    server.delete("web", namespace="shop", path=NETWORK_POLICIES.path)
    again = Followed(api, state)
    assert again.source.is_settled
    assert again.mode(app="web")[0] == "audit", "it is saved"
    async with again.running():
        assert again.mode(app="web")[0] == "enforce"


async def test_gates_keep_their_mode_until_the_first_list(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    seen = Followed(api, state)
    assert seen.modes.kept_up_to("shop") is Mode.STRICT
    async with seen.running():
        assert seen.modes.kept_up_to("shop") is Mode.OFF


async def test_modes_of_all_pods_are_decided_again_once_policies_are_listed(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.forbid(NETWORK_POLICIES.path)
    async with Followed(api, state).running() as seen:
        assert seen.changed.take() == [NODE]
        await asyncio.sleep(600)
        assert seen.changed.take() == []


async def test_cluster_without_policies_is_saved_as_such(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Followed(api, state).running():
        await asyncio.sleep(5)
    again = Followed(api, state)
    assert again.source.is_settled
    assert again.modes.kept_up_to("shop") is Mode.OFF


@pytest.mark.parametrize("late", [POLICIES.path, NETWORK_POLICIES.path])
async def test_gates_keep_their_mode_until_both_lists(
    server: ApiServer, api: ApiClient, state: pathlib.Path, late: str
) -> None:
    async def slow(request: web.Request) -> None:
        if request.path == late:
            await asyncio.sleep(5)

    server.faults.append(slow)
    async with Followed(api, state).running() as seen:
        assert not seen.source.is_settled
        await asyncio.sleep(5)
        assert seen.source.is_settled


async def test_cluster_without_the_resource_has_none_and_logs_one_line(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def absent(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=404) if request.path == POLICIES.path else None

    server.faults.append(absent)
    with structlog.testing.capture_logs() as lines:
        async with Followed(api, state).running() as seen:
            await asyncio.sleep(300)
            assert (seen.source.problems, seen.source.watcher.problem) == ([], "")
            assert seen.mode()[0] == "audit"
            assert seen.source.is_settled
    assert [line["log_level"] for line in lines] == ["info"]

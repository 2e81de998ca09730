"""Policies of an API server, as the checks of new pods see them."""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agent.kube.client import ApiClient
from agent.network_policy.source import POLICIES, NetworkPolicies
from agent.policy.cluster_network_policies.source import POLICIES as CLUSTER_POLICIES
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.blocking import may_block

__all__ = ["api", "kubeconfig", "listening", "server"]

pytestmark = pytest.mark.looptime


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "networkpolicies.json"


@may_block("the agent restores in a thread")
def restored(api: ApiClient, state: pathlib.Path) -> NetworkPolicies:
    made = NetworkPolicies(api, state=state, jitter=lambda: 0.5)
    made.restore()
    return made


@asynccontextmanager
async def running(api: ApiClient, state: pathlib.Path) -> AsyncIterator[NetworkPolicies]:
    made = restored(api, state)
    task = asyncio.create_task(made.run())
    try:
        await asyncio.sleep(1)
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def put(server: ApiServer, name: str = "web", **spec: Any) -> None:
    metadata = {"namespace": "shop", "name": name, "uid": name}
    server.put({"metadata": metadata, "spec": {"podSelector": {}, **spec}}, path=POLICIES.path)


def put_cluster(server: ApiServer, name: str = "all", **changes: Any) -> None:
    rule = {"action": "Deny", "from": [{"namespaces": {}}]}
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": [rule]}
    made = {"metadata": {"name": name, "uid": name}, "spec": {**spec, **changes}}
    server.put(made, path=CLUSTER_POLICIES.path)


def names(policies: NetworkPolicies) -> list[str]:
    known = policies.policies
    network = [one.metadata.full_name for one in known.network]
    return sorted([*network, *(one.name for one in known.cluster)])


async def test_each_change_is_followed(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with running(api, state) as policies:
        assert (names(policies), policies.problem) == ([], "")
        policies.changed.clear()
        put(server)
        put_cluster(server)
        await asyncio.sleep(1)
        assert policies.changed.is_set()
        assert names(policies) == ["all", "shop/web"]
        server.delete("web", namespace="shop", path=POLICIES.path)
        await asyncio.sleep(1)
        assert names(policies) == ["all"]


async def test_first_list_is_awaited(api: ApiClient, state: pathlib.Path) -> None:
    expected = "The API server has not listed networkpolicies yet."
    assert restored(api, state).problem == expected


async def test_missing_right_is_the_problem(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.forbid(POLICIES.path)
    async with running(api, state) as policies:
        assert policies.problem.startswith("The API server has not listed networkpolicies yet: ")
        # Pods that wait get it, too.
        assert policies.changed.is_set()
        policies.changed.clear()
        server.faults.clear()
        await asyncio.sleep(120)
        assert (policies.problem, policies.changed.is_set()) == ("", True)


async def test_cluster_without_cluster_network_policies_has_none(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def absent(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=404) if request.path == CLUSTER_POLICIES.path else None

    server.faults.append(absent)
    put(server)
    async with running(api, state) as policies:
        assert (names(policies), policies.problem) == (["shop/web"], "")


async def test_policy_that_is_not_understood_is_the_problem(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put_cluster(server, ingress=[{"action": "Deny", "from": [{"nodes": {}}]}])
    async with running(api, state) as policies:
        assert policies.problem.startswith("ClusterNetworkPolicy all is not understood: ")
        put_cluster(server)
        await asyncio.sleep(1)
        assert (names(policies), policies.problem) == (["all"], "")


async def test_saved_policies_count_while_the_api_server_is_away(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    rule = {"from": [{"podSelector": {"matchLabels": {"app": "a"}}}], "ports": [{"port": 1}]}
    put(server, ingress=[rule], policyTypes=["Ingress"])
    put_cluster(server)
    async with running(api, state) as policies:
        await asyncio.sleep(5)
        before = policies.policies

    async def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    server.faults.append(away)
    async with running(api, state) as policies:
        assert (policies.policies, policies.problem) == (before, "")


async def test_what_changes_is_saved_and_what_was_deleted_meanwhile_is_forgotten(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with running(api, state):
        await asyncio.sleep(5)
        put(server)
        put(server, "db")
        put_cluster(server)
        await asyncio.sleep(5)
    server.delete("web", namespace="shop", path=POLICIES.path)
    server.delete("all", namespace="", path=CLUSTER_POLICIES.path)
    assert names(restored(api, state)) == ["all", "shop/db", "shop/web"]
    async with running(api, state) as policies:
        assert names(policies) == ["shop/db"]


async def test_missing_right_to_cluster_network_policies_is_the_problem(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def forbidden(request: web.Request) -> web.StreamResponse | None:
        is_cluster = request.path == CLUSTER_POLICIES.path
        return apiserver.error_response(403, "Forbidden.") if is_cluster else None

    server.faults.append(forbidden)
    async with running(api, state) as policies:
        assert policies.problem == (
            "The API server has not listed clusternetworkpolicies yet: Forbidden."
        )
        await asyncio.sleep(5)
    again = restored(api, state)
    assert again.problem == "", "what is saved counts"


async def test_first_of_several_policies_that_are_not_understood_is_the_problem(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    for name in ("b", "a"):
        put_cluster(server, name, tier="Other")
    async with running(api, state) as policies:
        assert policies.problem == (
            "ClusterNetworkPolicy a is not understood: Invalid enum value 'Other' - at `$.tier`."
        )


@pytest.mark.parametrize("late", [POLICIES.path, CLUSTER_POLICIES.path])
async def test_end_of_the_first_lists_is_a_change(
    server: ApiServer, api: ApiClient, state: pathlib.Path, late: str
) -> None:
    async def slow(request: web.Request) -> None:
        if request.path == late:
            await asyncio.sleep(5)

    server.faults.append(slow)
    async with running(api, state) as policies:
        assert not policies.changed.is_set()
        await asyncio.sleep(5)
        assert policies.changed.is_set()

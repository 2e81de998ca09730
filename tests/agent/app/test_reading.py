"""The read-only API: who gets which namespaces, and what a client can cost."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from agent.admin.report import AgentReport
from agent.app.reading import Reading
from agent.app.remote_metrics import RemoteMetrics
from agent.errors import PodgateError
from agent.kube.client import ApiClient
from agent.operate.explain.model import PodExplanation
from agent.serving import peers
from agent.serving.places import Places
from tests.agent.app.two_pods import Agent
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.test_token_reviews import ACCESS_REVIEWS, TOKEN_REVIEWS

AUDIENCE = "podgate.io/agent"


class Reviewer:
    """Tokens are names of users; each may get the pods of the namespace with its name, and `admin`
    the path."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.audiences = [AUDIENCE]
        server.faults.append(self._answer)

    async def _answer(self, request: web.Request) -> web.Response | None:
        if request.path not in (TOKEN_REVIEWS, ACCESS_REVIEWS):
            return None
        spec = self.server.received[-1].body["spec"]
        if request.path == TOKEN_REVIEWS:
            assert spec["audiences"] == [AUDIENCE]
            is_known = spec["token"] != "stolen"
            status: dict[str, Any] = {"authenticated": is_known, "audiences": self.audiences}
            status["user"] = {"username": spec["token"]}
            return web.json_response({"status": status}, status=201)
        pods = spec.get("resourceAttributes", {})
        path = spec.get("nonResourceAttributes", {})
        is_allowed = (
            path == {"path": "/read", "verb": "get"}
            if spec["user"] == "admin"
            else pods == {"namespace": spec["user"], "resource": "pods", "verb": "get"}
        )
        return web.json_response({"status": {"allowed": is_allowed}}, status=201)


def explain(name: str, report: AgentReport) -> PodExplanation:
    namespace, _, short = name.partition("/")
    if short not in ("web", "vault"):
        raise PodgateError(f"no pod {name} is known on this node")
    return PodExplanation(
        namespace=namespace, name=short, uid="u", is_well=True, from_agent=True, checks=[]
    )


class Client:
    def __init__(self, port: int, agent: Agent, reviewer: Reviewer) -> None:
        self._port = port
        self.agent = agent
        self.reviewer = reviewer

    async def get(
        self, path: str, token: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        sent = {"X-Podgate-Token": token} if token else {}
        url = f"https://127.0.0.1:{self._port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=sent | (headers or {}), ssl=tls) as response,
        ):
            return response.status, await response.text()


@pytest.fixture
async def client(server: ApiServer, api: ApiClient) -> AsyncIterator[Client]:
    agent = Agent()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        reading = Reading(agent, api, explain_pod=explain, now=lambda: 0.0)
        made = RemoteMetrics(agent, api, (bound,), None, reading=reading)
        running = asyncio.create_task(made.run())
        try:
            yield Client(int(bound.getsockname()[1]), agent, Reviewer(server))
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_namespace_is_for_those_who_may_get_its_pods(client: Client) -> None:
    for kind in ("status", "drops", "rules"):
        code, body = await client.get(f"/read/{kind}?namespace=shop", "shop")
        assert code == 200
        assert msgspec.json.decode(body)["namespace"] == "shop"
        assert "vault" not in body
        for path in (f"/read/{kind}?namespace=bank", f"/read/{kind}", f"/read/{kind}?namespace="):
            what = "nor the pods of namespace bank" if "bank" in path else "of all namespaces"
            assert await client.get(path, "shop") == (
                403,
                f"the token's service account may not get the non-resource URL /read {what}\n",
            )


async def test_all_namespaces_are_for_those_who_may_get_the_path(client: Client) -> None:
    code, body = await client.get("/read/status", "admin")
    assert (code, "vault" in body, "web" in body) == (200, True, True)
    assert msgspec.json.decode(body, type=AgentReport).namespace == ""


@pytest.mark.parametrize("token", ["", "stolen", "two words"])
async def test_others_get_nothing(client: Client, token: str) -> None:
    assert await client.get("/read/status", token) == (
        401,
        f"send a service account's token for the audience {AUDIENCE} in X-Podgate-Token\n",
    )


async def test_client_that_may_read_gets_one_of_the_places_that_are_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted: list[object] = []
    monkeypatch.setattr(Places, "trust", lambda places, peer: trusted.append(peer))
    assert (await client.get("/read/status", "shop"))[0] == 403
    assert trusted == []
    assert (await client.get("/read/status", "admin"))[0] == 200
    assert trusted == [peers.of_user(os.getuid())]


async def test_token_for_another_audience_is_rejected(client: Client) -> None:
    client.reviewer.audiences = ["https://kubernetes.default.svc"]
    assert (await client.get("/read/status", "admin"))[0] == 401
    client.reviewer.audiences = []
    assert (await client.get("/read/status?namespace=shop", "shop"))[0] == 401


async def test_users_own_token_is_not_read(client: Client) -> None:
    """It would be the node's to use."""
    code, _ = await client.get("/read/status", headers={"Authorization": "Bearer admin"})
    assert code == 401
    assert client.reviewer.server.of(TOKEN_REVIEWS, method="POST") == []


async def test_right_to_read_is_none_to_metrics(client: Client) -> None:
    code, _ = await client.get("/metrics", "admin")
    assert code == 401


async def test_pod_of_another_namespace_is_not_explained(client: Client) -> None:
    code, body = await client.get("/read/explain-pod?namespace=shop&pod=shop/web", "shop")
    assert (code, '"name":"web"' in body) == (200, True)
    for pod in ("bank/vault", "vault", "shop", ""):
        found = await client.get(f"/read/explain-pod?namespace=shop&pod={pod}", "shop")
        assert found == (404, f"pod {pod} is not in namespace shop\n")


async def test_clients_share_a_report_of_the_last_seconds(client: Client) -> None:
    await asyncio.gather(*(client.get("/read/status", "admin") for _ in range(8)))
    await client.get("/read/status?namespace=shop", "shop")
    assert client.agent.made == 1


async def test_many_readers_by_one_proxy_are_not_limited_as_one_address(client: Client) -> None:
    codes = [(await client.get(f"/read/status?namespace=n{n}", f"n{n}"))[0] for n in range(15)]
    assert set(codes) == {200}

"""The server for Prometheus on other machines: who gets what, and what a client can hold."""

import asyncio
import contextlib
import datetime
import os
import pathlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
import structlog.testing
from aiohttp.test_utils import make_mocked_request

from agent.admin import endpoints
from agent.app import remote_metrics
from agent.app.remote_metrics import RemoteMetrics
from agent.kube import self_signed
from agent.kube.client import ApiClient
from agent.logs import Event
from agent.operate.page.server import StatusPage
from agent.serving import peers
from agent.serving.places import Places
from tests import polling, unprivileged
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.test_token_reviews import Cluster
from tests.agent.operate.page.reports import Reporter

METRICS = b'podgate_pod_condition{namespace="shop",pod="web"} 1.0\n'
BEARER = {"Authorization": "Bearer good"}


class Served:
    """A process whose metrics are `METRICS`, and that waits for a pod."""

    def unhealthy_reason(self) -> str | None:
        return None

    def unready_reason(self) -> str | None:
        return "pod shop/web waits"

    async def metrics(self) -> bytes:
        return METRICS


@contextlib.asynccontextmanager
async def serving(
    api: ApiClient,
    certificate: tuple[pathlib.Path, pathlib.Path] | None = None,
) -> AsyncIterator[int]:
    """Its port on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        page = StatusPage(Reporter())
        made = RemoteMetrics(Served(), api, (bound,), certificate, page=page)
        running = asyncio.create_task(made.run())
        try:
            yield int(bound.getsockname()[1])
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@pytest.fixture
async def port(server: ApiServer, api: ApiClient) -> AsyncIterator[int]:
    Cluster(server)
    async with serving(api) as found:
        yield found


async def get(
    port: int,
    path: str = "/metrics",
    headers: dict[str, str] | None = None,
    authority: str | None = None,
) -> tuple[int, bytes]:
    """authority: the certificate to trust, PEM; None: any."""
    tls = ssl.create_default_context(cadata=authority)
    if authority is None:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, ssl=tls, server_hostname="node1") as response,
    ):
        return response.status, await response.read()


async def test_metrics_are_for_clients_with_the_right(port: int) -> None:
    assert await get(port, headers=BEARER) == (200, METRICS)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        ("Bearer", 401),
        ("Basic Z29vZDpnb29k", 401),
        ("Bearer stolen", 401),
        ("Bearer other", 403),
    ],
)
async def test_others_get_no_names(port: int, authorization: str, status: int) -> None:
    code, body = await get(port, headers={"Authorization": authorization})
    assert (code, b"web" in body) == (status, False)


async def test_health_is_for_all_without_names(port: int) -> None:
    assert await get(port, "/healthz") == (200, b"ok\n")
    code, body = await get(port, "/readyz")
    assert (code, b"web" in body) == (503, False)


@pytest.mark.parametrize(
    ("authorization", "reads_names"), [("Bearer good", True), ("Bearer other", False), ("", False)]
)
async def test_status_page_has_names_for_clients_with_the_right(
    port: int, authorization: str, reads_names: bool
) -> None:
    code, body = await get(port, "/", headers={"Authorization": authorization})
    assert (code, b"shop/web" in body, b"curl" in body) == (200, reads_names, reads_names)
    assert b"gates" in body


async def test_api_server_that_gives_no_answer_admits_no_client(
    server: ApiServer,
    api: ApiClient,
) -> None:
    Cluster(server).is_away = True
    async with serving(api) as port:
        code, body = await get(port, headers=BEARER)
        assert (code, b"web" in body) == (503, False)


async def test_plain_http_gets_nothing(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert METRICS not in await reader.read()


async def test_silent_clients_do_not_keep_prometheus_out(port: int) -> None:
    silent = [
        await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.7.{number}", 0))
        for number in range(1, 201)
    ]
    assert await get(port, headers=BEARER) == (200, METRICS)
    for _, writer in silent:
        writer.close()


_HOLD = """
import socket
held = [
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), source_address=(f"127.0.7.{one}", 0))
    for one in range(1, 201)
]
ready(len(held))
"""


@pytest.mark.kernel
async def test_user_without_rights_does_not_keep_prometheus_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        attack = unprivileged.running(_HOLD, str(port))
        assert await asyncio.to_thread(stack.enter_context, attack) == "200"
        assert await get(port, headers=BEARER) == (200, METRICS)


async def test_client_that_was_authorized_gets_one_of_the_places_that_are_kept(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = []
    monkeypatch.setattr(Places, "trust", lambda places, peer: trusted.append(peer))
    assert (await get(port, headers={"Authorization": "Bearer other"}))[0] == 403
    assert trusted == []
    assert (await get(port, headers=BEARER))[0] == 200
    assert trusted == [peers.of_user(os.getuid())]


def write_certificate(directory: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    now = datetime.datetime.now(datetime.UTC)
    pair = self_signed.certificate(name, [name], now, datetime.timedelta(days=1))
    files = directory / "tls.crt", directory / "tls.key"
    for path, content in zip(files, (pair.certificate, pair.key), strict=True):
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(content)
        os.rename(unfinished, path)
    return files


async def test_renewed_certificate_is_used_and_a_broken_one_is_not(
    server: ApiServer,
    api: ApiClient,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_metrics, "_RELOAD_SECONDS", 0.05)
    Cluster(server)
    files = write_certificate(tmp_path, "node1")
    async with serving(api, files) as port:
        first = files[0].read_text()
        assert await get(port, headers=BEARER, authority=first) == (200, METRICS)
        with structlog.testing.capture_logs() as lines:
            files[0].write_text("half a certificate")
            await asyncio.sleep(0.3)
        assert [line["event"] for line in lines] == [Event.METRICS_CERTIFICATE_UNREADABLE]
        assert await get(port, headers=BEARER, authority=first) == (200, METRICS)
        second = write_certificate(tmp_path, "node1")[0].read_text()

        async def trusts(authority: str) -> bool:
            with contextlib.suppress(aiohttp.ClientSSLError):
                return (await get(port, headers=BEARER, authority=authority))[0] == 200
            return False

        is_used: Callable[[bool], bool] = bool
        await polling.request_until("the new one", lambda: trusts(second), is_used)


@pytest.mark.parametrize(
    ("remote", "host", "is_served"),
    [
        ("127.0.0.1", "127.0.0.1:9650", True),
        ("::1", "[::1]:9650", True),
        ("198.18.0.7", "127.0.0.1:9650", False),
        ("127.0.0.1", "rebound.example", False),
        ("", "127.0.0.1", False),
    ],
)
async def test_local_address_serves_names_to_this_machine(
    remote: str, host: str, is_served: bool
) -> None:
    request = make_mocked_request("GET", "/metrics", headers={"Host": host}).clone(remote=remote)
    rejected = await endpoints.reject_remote(request)
    assert (rejected is None) is is_served

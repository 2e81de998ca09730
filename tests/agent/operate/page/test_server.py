"""Who reads names on the status page, and the headers that protect it."""

import asyncio
import base64
import hashlib
import pathlib
import re
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from agent.admin import endpoints
from agent.operate.page.server import StatusPage
from tests.agent.operate.page.reports import Reporter

NAMES = b"shop/web"


@pytest.fixture
def reporter() -> Reporter:
    return Reporter()


@pytest.fixture
async def sockets(reporter: Reporter, tmp_path: pathlib.Path) -> AsyncIterator[dict[str, str]]:
    """A page on TCP of all addresses, and one on a unix socket: their port and path."""
    page = StatusPage(reporter)
    public, admin = web.Application(), web.Application()
    page.add_to(public, reject=endpoints.reject_remote)
    page.add_to(admin, reject=None)
    runners = [web.AppRunner(public, access_log=None), web.AppRunner(admin, access_log=None)]
    for runner in runners:
        await runner.setup()
    path = str(tmp_path / "admin.sock")
    site = web.TCPSite(runners[0], "127.0.0.1", 0)
    await site.start()
    await web.UnixSite(runners[1], path).start()
    assert site._server is not None
    yield {"port": str(runners[0].addresses[0][1]), "path": path}
    for runner in runners:
        await runner.cleanup()


async def get(
    url: str, *, path: str | None = None, host: str | None = None
) -> tuple[bytes, dict[str, str]]:
    connector = aiohttp.UnixConnector(path=path) if path else aiohttp.TCPConnector()
    headers = {"Host": host} if host else {}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers=headers) as response,
    ):
        assert response.status == 200
        return await response.read(), dict(response.headers)


async def test_client_of_this_machine_reads_names(sockets: dict[str, str]) -> None:
    body, _ = await get(f"http://127.0.0.1:{sockets['port']}/")
    assert NAMES in body


async def test_admin_socket_reads_names(sockets: dict[str, str]) -> None:
    body, _ = await get("http://podgate/", path=sockets["path"])
    assert NAMES in body


async def test_stranger_reads_counts_only(
    sockets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.Request, "remote", "198.18.7.7")
    body, _ = await get(f"http://127.0.0.1:{sockets['port']}/")
    assert NAMES not in body
    assert b"curl" not in body
    assert b"gates" in body


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:9650", "198.18.0.9"])
async def test_name_that_was_made_to_resolve_to_the_loopback_reads_no_names(
    sockets: dict[str, str], host: str
) -> None:
    body, _ = await get(f"http://127.0.0.1:{sockets['port']}/", host=host)
    assert NAMES not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:9650", "127.0.0.1", "[::1]:9650"])
async def test_own_names_of_the_loopback_read_names(sockets: dict[str, str], host: str) -> None:
    body, _ = await get(f"http://127.0.0.1:{sockets['port']}/", host=host)
    assert NAMES in body


async def test_policy_admits_the_style_sheet_and_nothing_else(sockets: dict[str, str]) -> None:
    body, headers = await get(f"http://127.0.0.1:{sockets['port']}/")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script" not in policy
    (sheet,) = re.findall(rb"<style>(.*?)</style>", body, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(sheet).digest()).decode() in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Type"] == "text/html; charset=utf-8"


async def test_many_clients_share_one_report(sockets: dict[str, str], reporter: Reporter) -> None:
    url = f"http://127.0.0.1:{sockets['port']}/"
    await asyncio.gather(*(get(url) for _ in range(20)))
    assert reporter.reports <= 2  # a slow machine may take longer than a report is kept


async def test_report_is_read_again_after_a_while(reporter: Reporter) -> None:
    seconds = 0.0
    page = StatusPage(reporter, now=lambda: seconds)
    for expected, at in ((1, 0.0), (1, 4.9), (2, 5.1)):
        seconds = at
        await page.response(with_names=True)
        assert reporter.reports == expected

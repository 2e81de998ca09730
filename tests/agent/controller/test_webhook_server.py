"""The webhook within limits: any pod of the cluster can connect, and API servers are served."""

import asyncio
import contextlib
import datetime
import io
import socket
import ssl
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from agent.controller import review, webhook_server
from agent.controller.webhook_server import WebhookServer
from agent.kube import self_signed
from agent.kube.client import ApiClient
from tests import polling

NAME = "podgate-controller"
REVIEW = msgspec.json.encode({"request": {"uid": "1", "object": {"spec": {"containers": []}}}})
HEAD = f"POST {review.PROBE_SPEC_PATH} HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 1048577\r\n\r\n"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Webhook:
    def __init__(self, port: int, authority: bytes) -> None:
        self._port = port
        self._tls = ssl.create_default_context(cadata=authority.decode())

    async def review(self, body: bytes = REVIEW) -> int:
        url = f"https://127.0.0.1:{self._port}{review.PROBE_SPEC_PATH}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                url, data=io.BytesIO(body), ssl=self._tls, server_hostname=NAME
            ) as response,
        ):
            await response.read()
            return response.status

    async def hold(self) -> asyncio.StreamWriter:
        """A review whose last byte does not come."""
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname=NAME
        )
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD.encode() + bytes(1 << 20))
            await writer.drain()
        return writer


@pytest.fixture
async def webhook(api: ApiClient) -> AsyncIterator[Webhook]:
    now = datetime.datetime.now(datetime.UTC)
    pair = self_signed.certificate(NAME, [NAME], now, datetime.timedelta(days=1))
    port = free_port()
    made = WebhookServer(api, "podgate", host="127.0.0.1", port=port)
    await asyncio.to_thread(made._load, pair)
    running = asyncio.create_task(made.run())
    found = Webhook(port, pair.certificate)
    await polling.request_until("an answer", lambda: status_of(found), lambda status: status == 200)
    try:
        yield found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def status_of(webhook: Webhook) -> int:
    with contextlib.suppress(aiohttp.ClientConnectorError):
        return await webhook.review()
    return 0


async def test_unfinished_reviews_hold_little_memory_and_keep_no_other_review_out(
    webhook: Webhook,
) -> None:
    held = [await webhook.hold() for _ in range(60)]
    assert await webhook.review() == 200
    most = webhook_server._LIMITS.bodies_bytes >> 20
    await polling.until("the others are closed", lambda: sum(map(is_open, held)) <= most)
    for writer in held:
        writer.close()


def is_open(writer: asyncio.StreamWriter) -> bool:
    return not writer.is_closing()


async def test_review_beyond_the_limit_of_the_api_server_is_rejected(webhook: Webhook) -> None:
    assert await webhook.review(b" " * (5 << 20)) == 413

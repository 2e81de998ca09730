"""The webhook within limits: any pod of the cluster can connect, and API servers are served."""

import asyncio
import base64
import contextlib
import datetime
import io
import json
import pathlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import prometheus_client
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.controller import metrics, review, webhook_server
from agent.controller.review_queue import ReviewQueue
from agent.controller.settings import WebhookSettings
from agent.controller.webhook_server import WebhookServer
from agent.kube import self_signed
from agent.kube.self_signed import KeyPair
from agent.serving import http
from agent.serving.places import Limits
from tests import polling, unprivileged

NAME = "podgate-controller"
REVIEW = msgspec.json.encode({"request": {"uid": "1", "object": {"spec": {"containers": []}}}})
HEAD = f"POST {review.PROBE_SPEC_PATH} HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 1048577\r\n\r\n"
DAY = datetime.timedelta(days=1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def new_pair(name: str = NAME, *, start: datetime.timedelta = DAY * 0) -> KeyPair:
    """start: from now."""
    return self_signed.certificate(name, [name], datetime.datetime.now(datetime.UTC) + start, DAY)


def write(directory: pathlib.Path, pair: KeyPair) -> None:
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)


class Webhook:
    def __init__(self, port: int, authority: bytes) -> None:
        self.port = port
        self.tls = ssl.create_default_context(cadata=authority.decode())

    async def review(self, body: bytes = REVIEW) -> int:
        status, _, _ = await self.answer(review.PROBE_SPEC_PATH, body)
        return status

    async def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and content."""
        url = f"https://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                url, data=io.BytesIO(body), ssl=self.tls, server_hostname=NAME
            ) as response,
        ):
            return response.status, response.content_type, await response.read()

    async def hold(self) -> asyncio.StreamWriter:
        """A review whose last byte does not come."""
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname=NAME
        )
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD.encode() + bytes(1 << 20))
            await writer.drain()
        return writer


@contextlib.asynccontextmanager
async def serving(settings: WebhookSettings) -> AsyncIterator[WebhookServer]:
    made = WebhookServer(settings)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def webhook(tmp_path: pathlib.Path) -> AsyncIterator[Webhook]:
    pair = new_pair()
    write(tmp_path, pair)
    port = free_port()
    async with serving(WebhookSettings(host="127.0.0.1", port=port, directory=tmp_path)):
        found = Webhook(port, pair.certificate)
        await polling.request_until("an answer", lambda: status_of(found), lambda one: one == 200)
        yield found


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


_HOLD = """
import socket, ssl
tls = ssl._create_unverified_context()
held = []
for _ in range(60):
    try:
        one = tls.wrap_socket(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
        held.append(one)
        one.sendall(sys.argv[2].encode() + bytes(1 << 20))
    except OSError:
        pass  # the server has closed one of them
ready(len(held))
"""


@pytest.mark.kernel
async def test_user_without_rights_keeps_no_review_out(webhook: Webhook) -> None:
    with contextlib.ExitStack() as stack:
        attack = unprivileged.running(_HOLD, str(webhook.port), HEAD)
        held = await asyncio.to_thread(stack.enter_context, attack)
        assert int(held) > 0
        assert await webhook.review() == 200


async def test_review_beyond_the_limit_of_the_api_server_is_rejected(webhook: Webhook) -> None:
    assert await webhook.review(b" " * (5 << 20)) == 413


async def test_event_loop_runs_while_a_review_is_answered(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renews the Lease, and a review of a large pod takes seconds."""
    is_begun, is_released = threading.Event(), threading.Event()
    read = review.read

    def slow(content: bytes) -> review.ReviewRequest:
        is_begun.set()
        assert is_released.wait(60)
        return read(content)

    monkeypatch.setattr(review, "read", slow)
    answer = asyncio.create_task(webhook.review())
    await polling.until("it is being answered", is_begun.is_set)
    # On the loop, which would otherwise hang here.
    is_released.set()
    assert await answer == 200


async def test_what_is_no_review_is_rejected(webhook: Webhook) -> None:
    assert await webhook.review(b"{}") == 400
    assert await webhook.review() == 200


@pytest.mark.parametrize("gate", sorted(review.INJECT_PATHS))
async def test_each_gate_is_injected_at_its_path(webhook: Webhook, gate: str) -> None:
    request = {"uid": "1", "object": {"spec": {"containers": []}}}
    body = msgspec.json.encode({"request": request})
    answer = review.inject(review.read(body), gate)
    found = await webhook.answer(review.INJECT_PATHS[gate], body)
    assert found == (200, "application/json", msgspec.json.encode(answer))
    gates = json.loads(base64.b64decode(answer["response"]["patch"]))[0]["value"]
    assert gates == [{"conditionType": gate}]


async def test_review_that_finds_no_room_is_not_answered(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server then ignores the webhook."""
    monkeypatch.setattr(webhook_server, "ReviewQueue", lambda: ReviewQueue(len(REVIEW)))
    pair, port = new_pair(), free_port()
    write(tmp_path, pair)
    async with serving(WebhookSettings(host="127.0.0.1", port=port, directory=tmp_path)):
        found = Webhook(port, pair.certificate)
        await polling.request_until("an answer", lambda: status_of(found), lambda one: one == 200)
        assert await found.review(REVIEW + b" ") == 503


@pytest.mark.parametrize("has_authorities", [False, True])
async def test_places_are_kept_for_api_servers_where_certificates_show_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, has_authorities: bool
) -> None:
    served: list[Limits] = []
    serve = http.serve

    def record(*arguments: Any, **named: Any) -> Any:
        served.append(arguments[2])
        return serve(*arguments, **named)

    monkeypatch.setattr(http, "serve", record)
    pair, authorities = new_pair(), tmp_path / "ca.crt"
    write(tmp_path, pair)
    authorities.write_bytes(new_client("kube-apiserver").certificate)
    settings = WebhookSettings(
        host="127.0.0.1",
        port=free_port(),
        directory=tmp_path,
        client_ca=authorities if has_authorities else None,
    )
    async with serving(settings) as made:
        await polling.until("it is ready", lambda: made.unready_reason() is None)
    (limits,) = served
    assert limits.connections == 512
    assert limits.trusted_connections == (256 if has_authorities else 0)


async def test_replica_with_a_certificate_is_ready_once_it_serves(tmp_path: pathlib.Path) -> None:
    pair = new_pair()
    write(tmp_path, pair)
    port = free_port()
    settings = WebhookSettings(host="127.0.0.1", port=port, directory=tmp_path)
    assert WebhookServer(settings).unready_reason() is not None
    async with serving(settings) as made:
        await polling.until("it is ready", lambda: made.unready_reason() is None)
        assert await Webhook(port, pair.certificate).review() == 200
        assert made.is_certificate_valid()


async def test_replica_without_a_certificate_is_ready_and_serves_once_there_is_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Secret is optional, since policies need a status without it."""
    monkeypatch.setattr(webhook_server, "_PERIOD_SECONDS", 0.02)
    port = free_port()
    settings = WebhookSettings(host="127.0.0.1", port=port, directory=tmp_path)
    async with serving(settings) as made:
        await polling.until("it is ready", lambda: made.unready_reason() is None)
        assert not made.is_certificate_valid()
        pair = new_pair()
        write(tmp_path, pair)
        await polling.until("it has a certificate", made.is_certificate_valid)
        found = Webhook(port, pair.certificate)
        await polling.request_until("an answer", lambda: status_of(found), lambda one: one == 200)
        replaced = new_pair()
        write(tmp_path, replaced)
        other = Webhook(port, replaced.certificate)
        await polling.request_until("the next", lambda: status_of(other), lambda one: one == 200)


@pytest.fixture
def logged() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def test_certificate_of_the_future_is_reported_once(
    tmp_path: pathlib.Path, logged: list[structlog.typing.EventDict]
) -> None:
    write(tmp_path, new_pair(start=100 * DAY))
    made = WebhookServer(WebhookSettings(directory=tmp_path))
    made.load()
    made.load()
    assert not made.is_certificate_valid()
    (warning,) = (line for line in logged if line["log_level"] == "warning")
    assert "valid from" in warning["error"]


@pytest.mark.parametrize("damaged", ["tls.crt", "tls.key"])
def test_damaged_files_leave_the_last_certificate_in_use(
    tmp_path: pathlib.Path, damaged: str, logged: list[structlog.typing.EventDict]
) -> None:
    write(tmp_path, new_pair())
    made = WebhookServer(WebhookSettings(directory=tmp_path))
    made.load()
    (tmp_path / damaged).write_bytes(b"x")
    made.load()
    assert made.is_certificate_valid()
    assert [line["log_level"] for line in logged] == ["info", "warning"]


def test_key_of_another_certificate_is_named_once(
    tmp_path: pathlib.Path, logged: list[structlog.typing.EventDict]
) -> None:
    write(tmp_path, KeyPair(new_pair().certificate, new_pair().key))
    made = WebhookServer(WebhookSettings(directory=tmp_path))
    made.load()
    made.load()
    assert not made.is_certificate_valid()
    assert [line["error"] for line in logged] == ["the key is not the certificate's"]


def new_client(name: str) -> KeyPair:
    """A certificate for clients that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return KeyPair(made.public_bytes(pem), key.private_bytes(pem, form, plain))


async def client_status(webhook: Webhook, directory: pathlib.Path, client: KeyPair | None) -> int:
    """0 without an answer."""
    if client:
        write(directory, client)
        webhook.tls.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    with contextlib.suppress(aiohttp.ClientError):
        return await webhook.review()
    return 0


async def test_clients_without_the_certificate_of_an_api_server_are_rejected(
    tmp_path: pathlib.Path,
) -> None:
    server, clients = tmp_path / "server", tmp_path / "client"
    server.mkdir()
    clients.mkdir()
    pair, apiserver, other = new_pair(), new_client("kube-apiserver"), new_client("kubelet")
    write(server, pair)
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(apiserver.certificate + other.certificate)
    port = free_port()
    settings = WebhookSettings(
        host="127.0.0.1",
        port=port,
        directory=server,
        client_ca=authorities,
        client_names=("kube-apiserver",),
    )

    async def status(client: KeyPair | None) -> int:
        return await client_status(Webhook(port, pair.certificate), clients, client)

    async with serving(settings):
        await polling.request_until("an answer", lambda: status(apiserver), lambda one: one == 200)
        assert await status(None) == 0
        assert await status(new_client("kube-apiserver")) == 0
        assert await status(other) == 403


def test_metric_of_the_certificate_is_for_replicas_with_a_webhook(tmp_path: pathlib.Path) -> None:
    def exported(settings: WebhookSettings) -> str:
        made = WebhookServer(settings)
        if settings.directory:
            made.load()
        registry = metrics.new_registry(lambda: True, made.is_certificate_valid)
        return prometheus_client.generate_latest(registry).decode()

    assert "certificate_valid" not in exported(WebhookSettings())
    name = "podgate_controller_webhook_certificate_valid"
    assert f"{name} 0.0" in exported(WebhookSettings(directory=tmp_path))
    write(tmp_path, new_pair())
    assert f"{name} 1.0" in exported(WebhookSettings(directory=tmp_path))

"""Configuration, TLS, tokens and errors of the API server."""

import asyncio
import contextlib
import datetime
import pathlib
import shutil
import ssl
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
from aiohttp import web

from agent.kube import connection
from agent.kube.client import MERGE, ApiClient, ApiError, NoClusterConfigError
from agent.kube.objects import ApiStatus, ApiStatusDetails, StatusCause
from agent.logs import Event
from tests.agent.api.certificates import Authority
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import PODS, ApiServer
from tests.agent.kube.conftest import opened, write_kubeconfig


def certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    cert, key = folder / "ca.crt", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def pod_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """What the kubelet mounts into each pod; its server is to be named in the environment."""
    (tmp_path / "token").write_text("first", encoding="utf-8")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(connection, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    return tmp_path


def tokens(server: ApiServer) -> list[str]:
    return [one.headers["Authorization"].partition(" ")[2] for one in server.received]


async def only_second(request: web.Request) -> web.StreamResponse | None:
    """Take no token but one."""
    is_good = request.headers["Authorization"].lower() == "bearer second"
    return None if is_good else apiserver.error_response(401, "Unauthorized")


async def request_pods(api: ApiClient) -> bytes:
    return await api.request("GET", PODS, query={"resourceVersion": "0"})


async def test_in_a_pod_by_tls_and_with_a_token_that_is_replaced(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(pod_files)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    server = ApiServer()
    async with server.running(tls=tls):
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        async with opened() as api:
            await request_pods(api)
            (pod_files / "token").write_text("second\n", encoding="utf-8")
            server.faults.append(only_second)
            with pytest.raises(ApiError, match="Unauthorized"):
                await request_pods(api)
            await request_pods(api)
    assert tokens(server) == ["first", "first", "second"]


async def test_server_without_a_valid_certificate_gets_no_token(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(pod_files)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    cert = cert.rename(pod_files / "renewed.crt")
    certificate(pod_files)
    server = ApiServer()
    async with server.running(tls=tls):
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        async with opened() as api:
            with pytest.raises(ApiError, match="certificate verify failed"):
                await request_pods(api)
            # The cluster's certificate is renewed, and no restart is needed.
            shutil.copy(cert, pod_files / "ca.crt")
            await request_pods(api)
    assert tokens(server) == ["first"]


@pytest.fixture
def strict_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Python 3.13, which the image has."""
    make = ssl.create_default_context

    def make_strict(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        made = make(*args, **kwargs)
        made.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return made

    monkeypatch.setattr(ssl, "create_default_context", make_strict)


async def request_with(
    pod_files: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    authorities: bytes,
    authority: Authority | None = None,
) -> None:
    """A request to a server whose certificate has no key identifiers, as those of EKS and MicroK8s.
    authorities: the pod's ca.crt, with OURS for the one that signs it, which is `authority`."""
    files = (authority or Authority.make()).files(pod_files / "server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)
    (pod_files / "ca.crt").write_bytes(authorities.replace(b"OURS", files.authorities.read_bytes()))
    server = ApiServer()
    async with server.running(tls=tls):
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        async with opened() as api:
            await request_pods(api)


async def test_certificates_need_no_more_extensions_than_for_go(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch, strict_contexts: None
) -> None:
    await request_with(pod_files, monkeypatch, b"OURS")


async def test_authority_may_be_signed_by_another(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intermediate = Authority.make("root").intermediate("of this cluster")
    await request_with(pod_files, monkeypatch, b"OURS", intermediate)


_BLOCK = b"-----BEGIN %s-----\nAAAA\n-----END %s-----\n"


@pytest.mark.parametrize(
    "around",
    [
        b"# Zertifikate f\xfcr den Cluster\nOURS",
        "# Überschrift\n".encode() + b"OURS",
        _BLOCK % (b"CERTIFICATE", b"CERTIFICATE") + b"OURS",
        b"OURS" + _BLOCK % (b"CERTIFICATE", b"CERTIFICATE"),
        _BLOCK % (b"DH PARAMETERS", b"DH PARAMETERS") + b"OURS",
        b"OURSOURS",
    ],
    ids=["latin-1", "utf-8", "damaged first", "damaged last", "another kind", "twice"],
)
async def test_other_text_beside_an_authority_is_skipped_as_by_go(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch, around: bytes
) -> None:
    await request_with(pod_files, monkeypatch, around)


@pytest.mark.parametrize("content", [b"none", _BLOCK % (b"CERTIFICATE", b"CERTIFICATE")])
async def test_file_without_a_certificate_is_named(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    (pod_files / "ca.crt").write_bytes(content)
    with pytest.raises(NoClusterConfigError, match="no certificate of an authority"):
        await ApiClient.open(None)


@pytest.mark.parametrize(("host", "port"), [("198.18.0.1", "https"), ("[", "443")])
async def test_address_that_is_none_is_one_sentence(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch, host: str, port: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setenv("HTTPS_PROXY", "http://198.18.0.9:3128")
    certificate(pod_files)
    with pytest.raises(NoClusterConfigError, match="is no address of a server"):
        await ApiClient.open(None)


async def test_proxy_of_another_kind_is_one_sentence(
    pod_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "198.18.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("HTTPS_PROXY", "socks5://198.18.0.9:1080")
    certificate(pod_files)
    with pytest.raises(NoClusterConfigError, match=r"is not an HTTP proxy.*in NO_PROXY"):
        await ApiClient.open(None)


@pytest.mark.looptime
async def test_token_is_read_again_each_minute(server: ApiServer, tmp_path: pathlib.Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    async with opened(write_kubeconfig(kubeconfig, token="first")) as api:
        await request_pods(api)
        write_kubeconfig(kubeconfig, token="second")
        await request_pods(api)
        await asyncio.sleep(61)
        await request_pods(api)
    assert tokens(server) == ["first", "first", "second"]


@pytest.mark.looptime
async def test_configuration_that_vanishes_is_not_needed(
    server: ApiServer, kubeconfig: str
) -> None:
    async with opened(kubeconfig) as api:
        await asyncio.to_thread(pathlib.Path(kubeconfig).unlink)
        await asyncio.sleep(61)
        await request_pods(api)
    assert tokens(server) == ["secret"]


@pytest.mark.looptime
async def test_slow_disk_has_a_minute_at_the_start_and_later_stops_no_request(
    server: ApiServer, kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_thread = asyncio.to_thread

    async def to_slow_thread(function: Callable[..., object], *args: object) -> object:
        await asyncio.sleep(50)
        return await to_thread(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", to_slow_thread)
    loop = asyncio.get_running_loop()
    async with opened(kubeconfig) as api:
        assert loop.time() >= 50
        await asyncio.sleep(61)
        started = loop.time()
        await request_pods(api)
        assert loop.time() - started < 20
    assert tokens(server) == ["secret"]


@pytest.mark.parametrize("content", ["", "clusters: [", "[]", "{current-context: nowhere}"])
async def test_bad_kubeconfig_is_one_sentence(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "kubeconfig").write_text(content, encoding="utf-8")
    with pytest.raises(NoClusterConfigError, match="name a kubeconfig in KUBECONFIG"):
        await ApiClient.open(str(tmp_path / "kubeconfig"))


async def test_kubeconfig_of_the_environment_is_used(
    server: ApiServer, kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    api = await ApiClient.open()
    try:
        await request_pods(api)
    finally:
        await api.aclose()
    assert tokens(server) == ["secret"]


async def test_outside_a_pod_without_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoClusterConfigError, match="service account"):
        await ApiClient.open()


async def test_server_without_a_listener_is_one_error(tmp_path: pathlib.Path) -> None:
    async with opened(write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")) as api:
        with pytest.raises(ApiError, match=r"127\.0\.0\.1:9") as caught:
            await request_pods(api)
        assert caught.value.code == 0
        assert caught.value.is_transient


@pytest.mark.looptime
async def test_request_that_is_never_answered_ends(server: ApiServer, api: ApiClient) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(100_000)
        return None

    server.faults.append(hang)
    started = asyncio.get_running_loop().time()
    with pytest.raises(ApiError, match="does not respond in time"):
        await request_pods(api)
    assert asyncio.get_running_loop().time() - started < 40


@pytest.mark.looptime
@pytest.mark.parametrize("is_cut", [False, True])
async def test_response_that_never_ends_is_an_error(
    server: ApiServer, api: ApiClient, *, is_cut: bool
) -> None:
    async def begin(request: web.Request) -> web.StreamResponse | None:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        if is_cut:
            request.transport.close()
        else:
            await asyncio.sleep(100_000)
        return response

    server.faults.append(begin)
    started = asyncio.get_running_loop().time()
    with pytest.raises(ApiError) as raised:
        await request_pods(api)
    assert (raised.value.code, raised.value.is_transient) == (0, True)
    if not is_cut:
        assert str(raised.value) == "the API server does not respond in time"
        assert 29 < asyncio.get_running_loop().time() - started < 40
    server.faults.clear()
    await request_pods(api)


async def test_error_has_the_message_of_the_status(server: ApiServer, api: ApiClient) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        return apiserver.as_recorded("patch-wrong-uid")

    server.faults.append(reject)
    with pytest.raises(ApiError, match="field is immutable") as caught:
        await request_pods(api)
    assert caught.value.code == 422
    assert ("metadata.uid", "FieldValueInvalid") in caught.value.causes
    assert not caught.value.is_transient


async def test_error_without_a_status_has_the_http_code(server: ApiServer, api: ApiClient) -> None:
    async def reject(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=502, text="<html>proxy</html>")

    server.faults.append(reject)
    with pytest.raises(ApiError, match="HTTP status 502 Bad Gateway") as caught:
        await request_pods(api)
    assert caught.value.is_transient


async def test_requests_name_their_user_agent(server: ApiServer, api: ApiClient) -> None:
    await request_pods(api)
    assert server.received[0].headers["User-Agent"].startswith("podgate/")


async def proxied(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, exempt: str) -> list[str]:
    """The hosts of the requests that a proxy of the environment gets, of one to another host.

    exempt: the value of NO_PROXY.
    """
    found: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse | None:
        found.append(request.headers["Host"])
        return None

    proxy = ApiServer()
    proxy.faults.append(answer)
    async with proxy.running():
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", exempt)
        path = folder / "kubeconfig"
        write_kubeconfig(path, "http://api.invalid:8080")
        async with opened(str(path)) as api:
            with contextlib.suppress(ApiError):
                await request_pods(api)
    return found


async def test_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    assert await proxied(monkeypatch, tmp_path, "") == ["api.invalid:8080"]


async def test_host_in_no_proxy_is_reached_directly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    assert await proxied(monkeypatch, tmp_path, "api.invalid") == []


async def test_requests_read_no_credentials_of_the_users_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """aiohttp would read ~/.netrc in a thread at each request, and reject it beside a token."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login other password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    server = ApiServer()
    async with server.running():
        path = tmp_path / "kubeconfig"
        write_kubeconfig(path, f"http://127.0.0.1:{server.port}")
        async with opened(str(path)) as api:
            await request_pods(api)
    assert all("Basic" not in one.headers.get("Authorization", "") for one in server.received)
    assert server.received


@pytest.mark.parametrize(
    ("code", "is_transient"),
    [
        (0, True),
        (400, False),
        (401, True),
        (403, False),
        (404, False),
        (409, False),
        (410, False),
        (422, False),
        (429, True),
        (499, False),
        (500, True),
        (503, True),
        (599, True),
    ],
)
def test_error_that_is_not_about_the_request_is_transient(code: int, *, is_transient: bool) -> None:
    """Also 401: a token may have expired, and is read again."""
    assert ApiError("x", code=code).is_transient is is_transient


@pytest.mark.parametrize(
    ("status", "code", "seconds", "expected"),
    [
        (ApiStatus(), 502, 0.0, ("HTTP status 502", 502, "", 0.0, ())),
        (ApiStatus(code=410), 0, 0.0, ("HTTP status 410", 410, "", 0.0, ())),
        (ApiStatus(code=410, reason="Expired"), 0, 0.0, ("Expired", 410, "Expired", 0.0, ())),
        (ApiStatus(message="Too old."), 410, 7.0, ("Too old.", 410, "", 7.0, ())),
        (
            ApiStatus(
                message="Wait.",
                reason="TooManyRequests",
                details=ApiStatusDetails(
                    (StatusCause("Reason", "Text.", "a.field"),), retry_after_seconds=5
                ),
            ),
            429,
            3.0,
            ("Wait.", 429, "TooManyRequests", 5.0, (("a.field", "Reason"),)),
        ),
    ],
)
def test_error_is_what_the_status_and_the_response_contain(
    status: ApiStatus, code: int, seconds: float, expected: tuple[Any, ...]
) -> None:
    error = ApiError.of_status(status, code=code, retry_after_seconds=seconds)
    found = (str(error), error.code, error.reason, error.retry_after_seconds, error.causes)
    assert found == expected


@pytest.mark.parametrize("text", ["Thu, 26 Nov 2026 12:00:05 GMT", "Thu, 26 Nov 2026 12:00:05"])
async def test_time_of_the_server_is_that_of_its_response(
    server: ApiServer, api: ApiClient, text: str
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Date": text})

    server.faults.append(answer)
    assert await api.date() == datetime.datetime(2026, 11, 26, 12, 0, 5, tzinfo=datetime.UTC)
    assert [one.path for one in server.received] == ["/version"]


async def test_response_without_a_readable_time_is_an_error(
    server: ApiServer, api: ApiClient
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Date": "noon"})

    server.faults.append(answer)
    with pytest.raises(ApiError, match="sends no time"):
        await api.date()


async def test_request_has_its_query_body_and_types(server: ApiServer, api: ApiClient) -> None:
    query = {"fieldSelector": "metadata.name=a&b", "x": "1"}
    await api.request("POST", "/apis/x", query=query, body={"a": [1]}, content_type=MERGE)
    await api.request("GET", PODS, query={"resourceVersion": ""}, accept="text/plain")
    first, second = server.received
    assert (first.method, first.path, first.query) == ("POST", "/apis/x", query)
    assert (first.body, first.headers["Content-Type"]) == ({"a": [1]}, MERGE)
    assert first.headers["Accept"] == "application/json"
    assert first.headers["Authorization"] == "Bearer secret"
    assert (second.body, second.headers["Accept"]) == (None, "text/plain")


@pytest.mark.parametrize(
    "chunks",
    [
        [b'{"a":1}\n{"b":2}\n'],
        [b'{"a"', b":1}", b'\n{"b":2', b"}\n\n"],
        [b'\n{"a":1}\n', b'{"b":2}\n{"c"'],
    ],
    ids=["at once", "in parts", "incomplete"],
)
async def test_stream_has_whole_lines_however_they_arrive(
    server: ApiServer, api: ApiClient, chunks: list[bytes]
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        return response

    server.faults.append(answer)
    async with api.stream(PODS, query={}, silence_seconds=5) as lines:
        assert [line async for line in lines] == [b'{"a":1}', b'{"b":2}']


@pytest.mark.looptime
async def test_configuration_that_vanishes_again_is_logged_again(
    server: ApiServer, kubeconfig: str
) -> None:
    path = pathlib.Path(kubeconfig)
    content = await asyncio.to_thread(path.read_text)
    counts = []
    async with opened(kubeconfig) as api:
        with structlog.testing.capture_logs() as logs:
            for is_there in (False, False, True, False):
                if is_there:
                    await asyncio.to_thread(path.write_text, content)
                else:
                    await asyncio.to_thread(path.unlink, missing_ok=True)
                await asyncio.sleep(61)
                await request_pods(api)
                unreadable = [one for one in logs if one["event"] is Event.CREDENTIALS_UNREADABLE]
                counts.append(len(unreadable))
    assert counts == [1, 1, 1, 2]


@pytest.mark.parametrize(("seconds", "respected"), [(7, 7.0), (86_400, 60.0)])
async def test_request_to_retry_in_hours_is_one_for_a_minute(
    server: ApiServer, api: ApiClient, seconds: int, respected: float
) -> None:
    """A proxy may send any number, and all writers wait for that long."""

    async def busy(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(429, "TooManyRequests", retry_after=seconds)

    server.faults.append(busy)
    with pytest.raises(ApiError) as raised:
        await request_pods(api)
    assert raised.value.retry_after_seconds == respected

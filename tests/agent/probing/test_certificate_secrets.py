"""Client certificates in Secrets: what is read, and each reason why it cannot be used."""

import base64
import json
from typing import Any, cast

import pytest

from agent.kube.client import ApiClient, ApiError
from agent.probing import certificate_secrets
from agent.probing.certificate_secrets import NotReachedError
from probes.protocols.client_certificates import CertificateError
from tests.probes.authorities import Authority


class Api:
    """An API server with one response."""

    def __init__(self, response: bytes | ApiError) -> None:
        self._response = response
        self.requests: list[tuple[str, str]] = []

    async def request(self, method: str, path: str, *, timeout_seconds: float) -> bytes:
        self.requests.append((method, path))
        if isinstance(self._response, ApiError):
            raise self._response
        return self._response


def secret(kind: str = "kubernetes.io/tls", **data: bytes) -> bytes:
    names = {name.replace("_", "."): base64.b64encode(part) for name, part in data.items()}
    found: dict[str, Any] = {name: part.decode() for name, part in names.items()}
    return json.dumps({"type": kind, "data": found}).encode()


async def content(response: bytes | ApiError) -> tuple[bytes, bytes, bytes]:
    return await certificate_secrets.content(cast(ApiClient, Api(response)), "shop", "queue")


async def test_certificate_key_and_authorities_are_read_by_name() -> None:
    api = Api(secret(tls_crt=b"certificate", tls_key=b"key", ca_crt=b"ca"))
    found = await certificate_secrets.content(cast(ApiClient, api), "shop", "a b")
    assert found == (b"certificate", b"key", b"ca")
    assert api.requests == [("GET", "/api/v1/namespaces/shop/secrets/a%20b")]
    assert await content(secret(tls_crt=b"certificate")) == (b"certificate", b"", b"")


WHERE = "the Secret shop/queue"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (ApiError("x", code=404), f"{WHERE} with a client certificate does not exist"),
        (
            ApiError("x", code=403),
            f"the agent may not read {WHERE}: bind a Role in its namespace that names it",
        ),
        (secret("Opaque"), f"{WHERE} is not of type kubernetes.io/tls"),
        (
            json.dumps({"type": "kubernetes.io/tls", "data": {"tls.crt": "?"}}).encode(),
            f"{WHERE} has data that is not base64",
        ),
    ],
)
async def test_secret_that_cannot_be_used_is_named_with_the_reason(
    response: bytes | ApiError, text: str
) -> None:
    with pytest.raises(CertificateError) as raised:
        await content(response)
    assert str(raised.value) == text
    assert not isinstance(raised.value, NotReachedError)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (ApiError("no response", code=0), f"{WHERE} cannot be read: no response"),
        (ApiError("too many requests", code=429), f"{WHERE} cannot be read: too many requests"),
        (b"[]", f"{WHERE} cannot be read: the response is no Secret"),
    ],
)
async def test_api_server_that_is_away_withdraws_nothing(
    response: bytes | ApiError, text: str
) -> None:
    with pytest.raises(NotReachedError) as raised:
        await content(response)
    assert str(raised.value) == text


async def test_agent_without_an_api_server_reads_no_secret() -> None:
    with pytest.raises(CertificateError, match=f"{WHERE} with a client certificate needs an API"):
        await certificate_secrets.content(None, "shop", "queue")


def test_certificate_is_made_again_only_of_other_content() -> None:
    authority = Authority()
    parts = (*authority.issue(), b"")
    first = certificate_secrets.made("shop", "queue", parts, None)
    assert certificate_secrets.made("shop", "queue", parts, first) is first
    renewed = (*authority.issue(), b"")
    assert certificate_secrets.made("shop", "queue", renewed, first).has_content(*renewed)
    with pytest.raises(CertificateError) as raised:
        certificate_secrets.made("shop", "queue", (b"", b"", b""), None)
    assert str(raised.value) == (
        f"the client certificate in {WHERE} is unusable: tls.crt has no certificate in PEM that "
        "can be read"
    )

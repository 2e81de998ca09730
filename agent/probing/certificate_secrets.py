"""Client certificates of probes in Secrets, read one by one and by name.

The agents' account may read no Secret by itself. The owner of a namespace binds a Role there that
names those for probes (docs/guides/mtls-probes.md).
"""

import base64
import binascii
import urllib.parse

import msgspec

from agent.kube import responses
from agent.kube.client import ApiClient, ApiError
from probes.protocols.client_certificates import CertificateError, ClientCertificate

SECRET_TYPE = "kubernetes.io/tls"  # noqa: S105  a type

_SECONDS = 10.0
_NOT_ALLOWED, _NOT_FOUND = 403, 404


class NotReachedError(CertificateError):
    """The API server did not respond, which withdraws no certificate."""


class _Secret(msgspec.Struct):
    type: str = ""
    data: dict[str, str] = {}


async def content(api: ApiClient | None, namespace: str, name: str) -> tuple[bytes, bytes, bytes]:
    """Certificate, key and authorities (or nothing) of a Secret.

    Raises `CertificateError`, and `NotReachedError` if the API server is away.
    """
    where = f"the Secret {namespace}/{name}"
    if api is None:
        raise CertificateError(f"{where} with a client certificate needs an API server")
    path = f"/api/v1/namespaces/{urllib.parse.quote(namespace)}/secrets/{urllib.parse.quote(name)}"
    try:
        found = responses.decode(await api.request("GET", path, timeout_seconds=_SECONDS), _Secret)
    except ApiError as error:
        if error.code == _NOT_FOUND:
            raise CertificateError(f"{where} with a client certificate does not exist") from error
        if error.code == _NOT_ALLOWED:
            text = f"the agent may not read {where}: bind a Role in its namespace that names it"
            raise CertificateError(text) from error
        raise NotReachedError(f"{where} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise NotReachedError(f"{where} cannot be read: the response is no Secret") from error
    if found.type != SECRET_TYPE:
        raise CertificateError(f"{where} is not of type {SECRET_TYPE}")
    try:
        return (
            _decoded(found.data, "tls.crt"),
            _decoded(found.data, "tls.key"),
            _decoded(found.data, "ca.crt"),
        )
    except binascii.Error:
        raise CertificateError(f"{where} has data that is not base64") from None


def made(
    namespace: str, name: str, parts: tuple[bytes, bytes, bytes], previous: ClientCertificate | None
) -> ClientCertificate:
    """The certificate of a Secret's content; `previous` if it is of the same. Raises
    `CertificateError`."""
    if previous is not None and previous.has_content(*parts):
        return previous
    try:
        return ClientCertificate(*parts)
    except CertificateError as error:
        text = f"the client certificate in the Secret {namespace}/{name} is unusable"
        raise CertificateError(f"{text}: {error}") from error


def _decoded(data: dict[str, str], name: str) -> bytes:
    return base64.b64decode(data.get(name, ""), validate=True)

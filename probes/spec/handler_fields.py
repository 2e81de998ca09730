"""The fields of each kind of handler in podgate's probe spec, which probes/spec/handlers.py lists.

The structs are the only definition: they validate the annotation, and its published JSON Schema is
generated from them.
"""

import ssl
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, UnsetType

from probes.spec import definitions
from probes.spec.definitions import PORT_MAX, NetworkHandler

CA_BUNDLE_MAX_CHARS = 16 * 1024
"""Several certificates; the annotations of an object may have 256 KiB together."""

STATUSES_MAX = 16

BODY_CONTAINS_MAX_CHARS = 256
"""Part of a text, not a regular expression: an expression may take forever on a hostile body."""

PortNumber = Annotated[int, Meta(ge=1, le=PORT_MAX)]
# Without the lookahead, Python's `$` would match before a final line break.
PortName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,15}(?!\n)$")]
Status = Annotated[int, Meta(ge=100, le=599)]
StatusRange = Annotated[str, Meta(pattern=r"^[1-5][0-9]{2}-[1-5][0-9]{2}(?!\n)$")]
ServerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]([-A-Za-z0-9._]{0,252})(?!\n)$")]
# RFC 1123; one component of a path at most.
ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(?!\n)$")]
NoHost = Annotated[
    str, Meta(max_length=0, description="Must be empty: a probe goes to its own pod only.")
]


class FieldError(ValueError):
    """A rule over several fields; `field` is the one to change."""

    def __init__(self, field: str, complaint: str) -> None:
        super().__init__(complaint)
        self.field = field


class StrictStruct(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """A struct in which a misspelt field is an error, not a default."""


class HeaderFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """One header of the request."""

    name: Annotated[str, Meta(pattern=r"^[-A-Za-z0-9]+(?!\n)$")]
    value: str = ""


class CertificateFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """A client certificate: exactly one of a Secret of type kubernetes.io/tls in the pod's
    namespace, and a directory on the node."""

    secret: ObjectName | UnsetType = UNSET
    file: ObjectName | UnsetType = UNSET
    verify_server: bool = False

    def __post_init__(self) -> None:
        if (self.secret is UNSET) == (self.file is UNSET):
            raise FieldError("", "needs one of secret and file")

    def name(self) -> definitions.CertificateName:
        return definitions.CertificateName(
            "" if self.secret is UNSET else self.secret,
            "" if self.file is UNSET else self.file,
            self.verify_server,
        )


class TlsFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """What is required of the server's certificate, without which any is accepted, and the
    certificate of the client."""

    server_name: ServerName | UnsetType = UNSET
    client_certificate: CertificateFields | UnsetType = UNSET
    ca_bundle: Annotated[str, Meta(min_length=1, max_length=CA_BUNDLE_MAX_CHARS)] | UnsetType = (
        UNSET
    )

    def __post_init__(self) -> None:
        certificate = self.client_certificate
        verifies_by_certificate = certificate is not UNSET and certificate.verify_server
        if self.ca_bundle is not UNSET and verifies_by_certificate:
            raise FieldError("caBundle", "is given in addition to verifyServer: keep one")
        is_verified = self.ca_bundle is not UNSET or verifies_by_certificate
        if self.server_name is UNSET and (is_verified or certificate is UNSET):
            raise FieldError("serverName", "is missing")
        if self.ca_bundle is not UNSET and not _is_ca_bundle(self.ca_bundle):
            raise FieldError("caBundle", "has no certificate in PEM that can be read")


class HandlerFields(Protocol):
    """The fields of one kind of handler, as `ProbeFields` has them by the kind's name."""

    @property
    def port(self) -> int | str: ...

    def handler(self, port: int) -> NetworkHandler:
        """The handler, with the port's number."""
        ...


class HttpFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """GET a path; 200 to 399 is healthy."""

    port: PortNumber | PortName
    path: str = "/"
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    http_headers: list[HeaderFields] = []
    protocol: Literal["HTTP1", "HTTP2"] = "HTTP1"
    tls: TlsFields | UnsetType = UNSET
    statuses: Annotated[list[Status | StatusRange], Meta(max_length=STATUSES_MAX)] = []
    body_contains: Annotated[str, Meta(max_length=BODY_CONTAINS_MAX_CHARS)] = ""
    host: NoHost = ""

    def __post_init__(self) -> None:
        if self.tls is not UNSET and self.scheme != "HTTPS":
            raise FieldError("tls", "may be given only with scheme HTTPS")
        for index, (first, last) in enumerate(map(_status_range, self.statuses)):
            if first > last:
                raise FieldError(f"statuses[{index}]", "must name the lower status first")
        if self.protocol == "HTTP2" and self.scheme != "HTTP":
            raise FieldError("protocol", "may be HTTP2 only with scheme HTTP")

    def handler(self, port: int) -> NetworkHandler:
        return definitions.HttpGet(
            port=port,
            path=self.path or "/",
            scheme=self.scheme,
            headers=tuple((header.name, header.value) for header in self.http_headers),
            protocol=self.protocol,
            tls=_tls(self.tls),
            statuses=tuple(map(_status_range, self.statuses)),
            body_contains=self.body_contains,
        )


class TcpFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """Connect; an open port is healthy."""

    port: PortNumber | PortName
    host: NoHost = ""

    def handler(self, port: int) -> NetworkHandler:
        return definitions.TcpSocket(port)


class GrpcFields(StrictStruct, frozen=True, kw_only=True, rename="camel"):
    """Call grpc.health.v1.Health/Check; only SERVING is healthy."""

    port: PortNumber | PortName
    service: str = ""
    mode: Literal["Plaintext", "TLS"] = "Plaintext"
    tls: TlsFields | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.tls is not UNSET and self.mode != "TLS":
            raise FieldError("tls", "may be given only with mode TLS")

    def handler(self, port: int) -> NetworkHandler:
        return definitions.Grpc(port, self.service, self.mode, _tls(self.tls))


def _tls(fields: TlsFields | UnsetType) -> definitions.TlsPolicy | None:
    if fields is UNSET:
        return None
    certificate = fields.client_certificate
    return definitions.TlsPolicy(
        "" if fields.server_name is UNSET else fields.server_name,
        "" if fields.ca_bundle is UNSET else fields.ca_bundle,
        None if certificate is UNSET else certificate.name(),
    )


def _status_range(status: int | str) -> tuple[int, int]:
    """Of 204 and "200-299"."""
    first, _, last = str(status).partition("-")
    return int(first), int(last or first)


def _is_ca_bundle(text: str) -> bool:
    if not text.isascii():
        return False
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        return False
    return True

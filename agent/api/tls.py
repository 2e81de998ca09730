"""Mutual TLS for gRPC, from files that are replaced when certificates are renewed."""

import dataclasses
import pathlib

import grpc
import structlog

from agent.errors import PodgateError
from agent.logs import Event

log = structlog.get_logger(__name__)


class TlsError(PodgateError):
    """A file of certificates or keys cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TlsContent:
    """What one side uses, PEM: the authorities that it trusts, its certificate chain and key."""

    authorities: bytes
    certificate: bytes
    key: bytes

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            ((self.key, self.certificate),), root_certificates=self.authorities
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of it. A Secret's volume replaces all of them in one step."""

    authorities: pathlib.Path
    certificate: pathlib.Path
    key: pathlib.Path

    def read(self) -> TlsContent:
        """Their content now, which belongs together. Blocks. Raises `TlsError`."""
        content = TlsContent(*map(_content, (self.authorities, self.certificate, self.key)))
        # With it a process takes 9 MB more, and few agents have these files.
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        _check(self.authorities, content.authorities)
        _check(self.certificate, content.certificate)
        own = x509.load_pem_x509_certificates(content.certificate)[0]
        try:
            key = serialization.load_pem_private_key(content.key, None)
        except (ValueError, TypeError) as error:
            raise TlsError(
                f"{self.key} has no private key (PEM, without a passphrase); check the file"
            ) from error
        if key.public_key() != own.public_key():
            raise TlsError(
                f"{self.key} is not the key of {self.certificate}; replace both in one step"
            )
        return content


class CurrentTls:
    """The newest usable content of the files. While they are not usable, the last one that was: a
    process without certificates still has other work."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads nothing yet."""
        self._files = files
        self.content: TlsContent | None = None
        """None: there was no usable one yet."""
        self.problem = ""
        """Why the files cannot be used now; empty if they can."""

    def refresh(self) -> bool:
        """Read the files; returns whether the content changed. Blocks. Never raises."""
        try:
            found = self._files.read()
        except TlsError as error:
            if self.problem != str(error):
                log.error(Event.SERVICES_TLS_UNUSABLE, error=str(error))
            self.problem = str(error)
            return False
        self.problem = ""
        is_changed, self.content = found != self.content, found
        return is_changed

    def server_credentials(self) -> grpc.ServerCredentials:
        """Require a client certificate of the authorities, and read the files at each handshake,
        in a thread of gRPC. There must be a content."""
        assert self.content is not None
        return grpc.dynamic_ssl_server_credentials(
            self.content.server_configuration(),
            self._renewed,
            require_client_authentication=True,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        is_changed = self.refresh()
        return self.content.server_configuration() if is_changed and self.content else None


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} cannot be read ({error.strerror}); check the file") from error


def _check(path: pathlib.Path, content: bytes) -> None:
    from cryptography import x509

    try:
        x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsError(f"{path} has no certificate (PEM); check the file") from error

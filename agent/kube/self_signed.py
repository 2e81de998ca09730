"""Certificates that are their own authority: clients trust exactly them, or none.

`python -m agent.kube.self_signed NAME` prints one of ten years and its key, for a server whose
clients trust none.
"""

import contextlib
import dataclasses
import datetime
import os
import ssl
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of nodes differ.
_BACKDATED: Final = datetime.timedelta(hours=1)
# No client trusts it, so its end only has to be after the process'.
_PRINTED_LIFETIME: Final = datetime.timedelta(days=3650)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def expires(self) -> datetime.datetime:
        return expiry(self.certificate)

    @property
    def valid_from(self) -> datetime.datetime:
        return _loaded(self.certificate).not_valid_before_utc

    @property
    def made(self) -> datetime.datetime:
        return self.valid_from + _BACKDATED

    def is_valid(self, now: datetime.datetime) -> bool:
        """Whether clients accept it at this time."""
        found = _loaded(self.certificate)
        return found.not_valid_before_utc <= now < found.not_valid_after_utc

    def load(self, tls: ssl.SSLContext) -> None:
        """Use it for new connections of a server."""
        with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
            tls.load_cert_chain(certificate, key)

    def check(self) -> None:
        """Raises `ValueError` if a part cannot be read, or they do not belong together."""
        key = serialization.load_pem_private_key(self.key, None).public_key()
        if key != _loaded(self.certificate).public_key():
            raise ValueError("the key is not the certificate's")

    def is_for(self, names: list[str]) -> bool:
        try:
            found = _loaded(self.certificate).extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
        except x509.ExtensionNotFound:
            return False
        return found.value.get_values_for_type(x509.DNSName) == names


def certificate(
    name: str, names: Iterable[str], now: datetime.datetime, lifetime: datetime.timedelta
) -> KeyPair:
    """A new certificate for DNS names, and its key. name: of its subject, for people."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        signed.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def expiry(certificate: bytes) -> datetime.datetime:
    """When a certificate (PEM) expires, in UTC."""
    return _loaded(certificate).not_valid_after_utc


def _loaded(certificate: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path of the content, which is in memory only: OpenSSL's interface takes files."""
    descriptor = os.memfd_create("podgate-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def main() -> None:
    name = sys.argv[1]
    now = datetime.datetime.now(datetime.UTC)
    made = certificate(name, [name], now, _PRINTED_LIFETIME)
    sys.stdout.buffer.write(made.certificate + made.key)


if __name__ == "__main__":
    main()

"""An authority, and certificates of it, as files; made for one test."""

import dataclasses
import datetime
import ipaddress
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.api.tls import TlsFiles

_DAY = datetime.timedelta(days=1)


@dataclasses.dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1, of servers and clients."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, name: str = "authority") -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(name, key, _signed(name, name, key, key, is_authority=True))

    def intermediate(self, name: str) -> "Authority":
        """Signed by this one."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(name, self.name, key, self.key, is_authority=True)
        return Authority(name, key, signed)

    def files(self, directory: pathlib.Path, name: str = "node") -> TlsFiles:
        """Write a new certificate of this authority, with its key."""
        directory.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(name, self.name, key, self.key, is_authority=False)
        files = TlsFiles(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")
        files.authorities.write_bytes(_pem(self.certificate))
        files.certificate.write_bytes(_pem(signed))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _signed(
    name: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(
            x509.SubjectAlternativeName([loopback]), critical=False
        ).add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

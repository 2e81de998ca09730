"""Authorities of test certificates, and servers that demand certificates of their clients."""

import contextlib
import datetime
import pathlib
import socket
import ssl
import threading
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.polling import PATIENCE_SECONDS

DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates. `certificate`: its own, PEM."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        issued = self._signed(self._name, self._key.public_key(), -DAY, 100 * DAY, is_ca=True)
        self.certificate = issued.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str = "client",
        *,
        begins: datetime.timedelta = -DAY,
        ends: datetime.timedelta = 30 * DAY,
    ) -> tuple[bytes, bytes]:
        """A certificate and its key, PEM. begins, ends: from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        issued = self._signed(_name(name), key.public_key(), begins, ends, is_ca=False)
        return issued.public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def demanding(self, folder: pathlib.Path, *alpn: str) -> ssl.SSLContext:
        """A server's context that accepts this authority's clients only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.files(folder, "server.test"))
        context.load_verify_locations(cadata=self.certificate.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def files(self, folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
        """A certificate and its key as files."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, content in zip(paths, self.issue(name), strict=True):
            path.write_bytes(content)
        return paths

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        begins: datetime.timedelta,
        ends: datetime.timedelta,
        *,
        is_ca: bool,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        common = subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(str(common))]), False)
            .sign(self._key, hashes.SHA256())
        )


@contextlib.contextmanager
def serving(listener: socket.socket, context: ssl.SSLContext, answer: bytes) -> Iterator[int]:
    """Answer each request over TLS by OpenSSL, which sends alerts (asyncio's servers send none)."""
    listener.settimeout(None)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.settimeout(PATIENCE_SECONDS)
                with contextlib.suppress(OSError), context.wrap_socket(connection, True) as tls:
                    while b"\r\n\r\n" not in tls.recv(1 << 16):
                        pass
                    tls.sendall(answer)

    thread = threading.Thread(target=serve, name="https server")
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

"""TLS for https and grpc probes, without I/O; certificates are verified only on request.

As in pkg/probe/http/http.go (`InsecureSkipVerify`): a probe checks whether the server is alive, and
a kubelet cannot know whose certificate it should have. For the same reason weak keys and hashes of
the server are accepted. A pod can name a CA bundle for podgate's own checks.
"""

import contextlib
import functools
import re
import ssl

from probes.errors import ProbeError
from probes.spec.definitions import TlsPolicy

# One for each bundle in use; a context has some 50 KB.
_CONTEXTS_MAX = 64
_CHUNK_BYTES = 16 * 1024  # one TLS record
_HEADER_BYTES = 5  # of a record
# OpenSSL's name is in the ssl module only since Python 3.12. Without it OpenSSL 3 rejects servers
# from before RFC 5746, which Go's client accepts; renegotiation is off on this side.
_OP_LEGACY_SERVER_CONNECT = 0x4


# OpenSSL's reasons for alerts of the server, up to the place in ssl.c that some of them name.
_ALERT = re.compile(r"\b(?:sslv3|tlsv1|tlsv13|ssl/tls) (?:alert )?([a-z ]+?)(?: \(.*)?$")
_GO_ALERTS = {
    "bad record mac": "bad record MAC",
    "certificate expired": "expired certificate",
    "certificate revoked": "revoked certificate",
    "certificate unknown": "unknown certificate",
    "decode error": "error decoding message",
    "decrypt error": "error decrypting message",
    "insufficient security": "insufficient security level",
    "protocol version": "protocol version not supported",
    "unknown ca": "unknown certificate authority",
    "unknown psk identity": "unknown PSK identity",
    "user cancelled": "user canceled",
}
"""Alerts that Go words otherwise (crypto/tls/alert.go)."""


_CERTIFICATE_ALERTS = frozenset(
    {
        "bad certificate",
        "unsupported certificate",
        "revoked certificate",
        "expired certificate",
        "unknown certificate",
        "unknown certificate authority",
        "access denied",
        "certificate required",
    }
)
"""With which a server rejects a client's certificate (RFC 8446 section 6.2), in Go's words."""


class TlsError(ProbeError):
    """The handshake failed or a record was bad; the message is Go's text where there is one.
    rejects_client: the server rejects the client's certificate, or the lack of one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        alert = text.removeprefix("remote error: tls: ")
        self.rejects_client = alert != text and alert in _CERTIFICATE_ALERTS


@functools.lru_cache(maxsize=_CONTEXTS_MAX)
def client_context(alpn: tuple[str, ...], ca_bundle: str = "") -> ssl.SSLContext:
    """The TLS context of all probes without a client certificate that offer these protocols and
    trust this bundle (empty: do not verify)."""
    return new_context(alpn, ca_bundle)


def new_context(alpn: tuple[str, ...], ca_bundle: str) -> ssl.SSLContext:
    """As `client_context`, for one user; TLS 1.2 and up, as Go's default."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_bundle:
        context.load_verify_locations(cadata=ca_bundle)
        # Exactly what the bundle has is trusted, be it a root or not.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | _OP_LEGACY_SERVER_CONNECT
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


class TlsTunnel:
    """One TLS client connection, as bytes in and bytes out.

    Without a policy no name is sent (SNI): probes go to addresses, and Go sends no name for those
    either.
    """

    __slots__ = ("_first", "_incoming", "_outgoing", "_tls", "is_closed", "ready")

    def __init__(self, alpn: tuple[str, ...], policy: TlsPolicy | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        bundle = policy.ca_bundle if policy else ""
        identity = policy.identity if policy else None
        context = identity.context(alpn, bundle) if identity else client_context(alpn, bundle)
        name = (policy.server_name or None) if policy else None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._first = b""
        self.ready = False
        """The handshake is done."""
        self.is_closed = False
        """The server will send nothing more."""

    def start(self) -> bytes:
        """The first bytes to send."""
        self._shake()
        return self.outgoing()

    def receive(self, data: bytes) -> list[bytes]:
        """Handle bytes from the socket (b"": its end); returns the decrypted pieces, possibly none.

        Send `outgoing` afterwards. Raises TlsError.
        """
        if data:
            if not self.ready:
                self._first += data[: _HEADER_BYTES - len(self._first)]
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        if not self.ready:
            self._shake()
        found: list[bytes] = []
        try:
            while self.ready and not self.is_closed:
                piece = self._tls.read(_CHUNK_BYTES)
                self.is_closed = not piece
                if piece:
                    found.append(piece)
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # An end without close_notify, at the end of a record: Go takes it as an end, too.
            self.is_closed = True
        except ssl.SSLError as error:
            raise TlsError(_text(error)) from error
        return found

    def encrypt(self, data: bytes) -> None:
        """Put `data` into `outgoing`; only when `ready`."""
        if data:
            self._tls.write(data)

    def outgoing(self) -> bytes:
        """The bytes to send; returned once."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def close(self) -> bytes:
        """The last bytes to send: close_notify, since some servers log its absence."""
        # It wants the server's close_notify in return, or there is nothing to close.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self.outgoing() if self.ready else b""

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            is_cut = 0 < len(self._first) < _HEADER_BYTES
            raise TlsError("unexpected EOF" if is_cut else "EOF") from error
        except ssl.SSLError as error:
            if self._first == b"HTTP/":
                raise TlsError("http: server gave HTTP response to HTTPS client") from error
            if self._first[:1] not in (b"\x15", b"\x16"):
                text = "tls: first record does not look like a TLS handshake"
                raise TlsError(text) from error
            raise TlsError(_text(error)) from error
        self.ready = True


def _text(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"tls: failed to verify certificate: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if found := _ALERT.search(reason):
        return f"remote error: tls: {_GO_ALERTS.get(found[1], found[1])}"
    return f"tls: {reason}"

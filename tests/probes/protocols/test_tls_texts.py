"""A TLS handshake that fails has the kubelet's text."""

from __future__ import annotations

import pytest

from probes.protocols import tls

# Texts of the kubelet's prober (Kubernetes 1.36.2, Go 1.26.10) for a fatal alert with this code
# instead of a ServerHello; the same as in Go's crypto/tls/alert.go.
ALERTS = {
    10: "unexpected message",
    20: "bad record MAC",
    21: "decryption failed",
    22: "record overflow",
    30: "decompression failure",
    40: "handshake failure",
    42: "bad certificate",
    43: "unsupported certificate",
    44: "revoked certificate",
    45: "expired certificate",
    46: "unknown certificate",
    47: "illegal parameter",
    48: "unknown certificate authority",
    49: "access denied",
    50: "error decoding message",
    51: "error decrypting message",
    60: "export restriction",
    70: "protocol version not supported",
    71: "insufficient security level",
    80: "internal error",
    86: "inappropriate fallback",
    90: "user canceled",
    110: "unsupported extension",
    111: "certificate unobtainable",
    112: "unrecognized name",
    113: "bad certificate status response",
    114: "bad certificate hash value",
    115: "unknown PSK identity",
    120: "no application protocol",
}


# RFC 8446 section 6.2: bad_certificate to certificate_unknown, unknown_ca, access_denied.
OF_CERTIFICATES = {42, 43, 44, 45, 46, 48, 49}


def failure(*pieces: bytes) -> tls.TlsError:
    tunnel = tls.TlsTunnel(())
    tunnel.start()
    try:
        for piece in (*pieces, b""):
            tunnel.receive(piece)
    except tls.TlsError as error:
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize(("code", "words"), ALERTS.items())
def test_alert_of_the_server_is_worded_as_in_go(code: int, words: str) -> None:
    error = failure(bytes((0x15, 3, 3, 0, 2, 2, code)))
    assert str(error) == f"remote error: tls: {words}"
    assert error.rejects_client == (code in OF_CERTIFICATES)


def test_only_an_alert_of_the_server_rejects_the_client() -> None:
    assert not tls.TlsError("bad certificate").rejects_client


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "http: server gave HTTP response to HTTPS client"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "tls: first record does not look like a TLS handshake"),
        (b"", "EOF"),
        (b"\x16", "unexpected EOF"),
        (b"\x16\x03", "unexpected EOF"),
    ],
)
def test_another_protocol_is_worded_as_in_go(data: bytes, words: str) -> None:
    for pieces in (
        (data,),
        (data[:2], data[2:]),
        tuple(data[at : at + 1] for at in range(len(data))),
    ):
        assert str(failure(*(piece for piece in pieces if piece))) == words

"""A probe with a CA bundle succeeds only if that bundle issued the server's certificate."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from probes.protocols import exchanges, grpc_health, http_get, tls
from probes.results import ProbeResult
from probes.spec.definitions import Grpc, HttpGet, TlsPolicy

NAME = "app.example"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate with this name, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=ignored", "-addext", f"subjectAltName=DNS:{name}"),
            *("-days", "3650", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With certificates for NAME, and for another name."""
    made = tmp_path_factory.mktemp("tls")
    certificate(made, NAME)
    certificate(made, "other.example")
    return made


def bundle(folder: Path, name: str = NAME) -> str:
    return (folder / f"{name}.pem").read_text()


class Server:
    """A TLS server in memory."""

    def __init__(self, folder: Path, accepted: Sequence[str] = ()) -> None:
        """accepted: application protocols, the preferred one first."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols([*accepted])
        context.load_cert_chain(folder / f"{NAME}.pem", folder / f"{NAME}.key")
        context.sni_callback = lambda _, name, __: self.names.append(name)
        self.names: list[str | None] = []
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    @property
    def selected(self) -> str | None:
        return self._tls.selected_alpn_protocol()

    def reply(self, data: bytes) -> bytes:
        self._incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._outgoing.read()

    def send(self, data: bytes, *, is_last: bool) -> bytes:
        """is_last: with close_notify."""
        self._tls.write(data)
        if is_last:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
        return self._outgoing.read()

    def read(self, data: bytes) -> list[bytes]:
        """The pieces in these records; b"" is close_notify."""
        self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            while not pieces or pieces[-1]:
                pieces.append(self._tls.read(1 << 16))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pieces.append(b"")
        return pieces


def connected(folder: Path) -> tuple[Server, tls.TlsTunnel]:
    server, tunnel = Server(folder), tls.TlsTunnel(())
    data = tunnel.start()
    while not tunnel.ready:
        assert not tunnel.is_closed
        assert tunnel.receive(server.reply(data)) == []
        data = tunnel.outgoing()
    assert tunnel.receive(server.reply(data)) == []
    return server, tunnel


def shake(folder: Path, policy: TlsPolicy | None) -> Server:
    """Raises TlsError."""
    server, tunnel = Server(folder), tls.TlsTunnel((), policy)
    data = tunnel.start()
    while not tunnel.ready:
        tunnel.receive(server.reply(data))
        data = tunnel.outgoing()
    return server


def test_both_ends_get_what_the_other_sends_and_its_end(folder: Path) -> None:
    server, tunnel = connected(folder)
    answer = bytes(range(256)) * 200
    sent = server.send(answer, is_last=False)
    first, rest = tunnel.receive(sent[:20_000]), tunnel.receive(sent[20_000:])
    assert (b"".join(first + rest), tunnel.is_closed) == (answer, False)
    assert first
    assert b"" not in first + rest
    tunnel.encrypt(b"request")
    tunnel.encrypt(b"")
    assert server.read(tunnel.outgoing()) == [b"request"]
    assert tunnel.outgoing() == b""
    assert tunnel.receive(server.send(b"last", is_last=True)) == [b"last"]
    assert tunnel.is_closed
    assert server.read(tunnel.close()) == [b""]


def test_end_between_records_is_an_end_of_the_answer(folder: Path) -> None:
    server, tunnel = connected(folder)
    assert tunnel.receive(server.send(b"answer", is_last=False)) == [b"answer"]
    assert tunnel.receive(b"") == []
    assert tunnel.is_closed


def test_record_that_was_changed_on_its_way_is_an_error(folder: Path) -> None:
    server, tunnel = connected(folder)
    sent = server.send(b"answer", is_last=False)
    with pytest.raises(tls.TlsError, match="bad record mac"):
        tunnel.receive(sent[:-1] + bytes([sent[-1] ^ 1]))


def test_connection_that_never_was_ready_ends_without_a_word() -> None:
    tunnel = tls.TlsTunnel(())
    assert tunnel.start()
    assert tunnel.close() == b""


def test_old_servers_are_probed_unless_they_are_to_be_verified(folder: Path) -> None:
    """Weak keys and hashes, and no RFC 5746; none of them may start a handshake again."""
    found = tls.client_context(()), tls.client_context((), bundle(folder))
    assert [context.security_level == 0 for context in found] == [True, False]
    options = ssl.OP_NO_RENEGOTIATION | 0x4  # SSL_OP_LEGACY_SERVER_CONNECT of openssl/ssl.h
    assert [context.options & options for context in found] == [options, options]


def test_certificate_of_the_bundle_is_accepted_for_its_name(folder: Path) -> None:
    assert shake(folder, TlsPolicy(NAME, bundle(folder))).names == [NAME]


@pytest.mark.parametrize(
    ("name", "issuer", "text"),
    [
        (NAME, "other.example", "self-signed certificate"),
        ("else.example", NAME, "Hostname mismatch"),
    ],
)
def test_other_certificates_and_names_are_not_accepted(
    folder: Path, name: str, issuer: str, text: str
) -> None:
    with pytest.raises(tls.TlsError, match=f"failed to verify certificate: .*{text}"):
        shake(folder, TlsPolicy(name, bundle(folder, issuer)))


def test_without_a_bundle_the_name_is_only_sent(folder: Path) -> None:
    assert shake(folder, TlsPolicy("else.example")).names == ["else.example"]
    assert shake(folder, None).names == [None]


@pytest.mark.parametrize("offered", [(), ("h2",), ("h2", "http/1.1")])
def test_offered_protocols_are_those_of_the_handler(folder: Path, offered: tuple[str, ...]) -> None:
    server = Server(folder, accepted=["http/1.1", "h2"])
    tunnel = tls.TlsTunnel(offered, None)
    data = tunnel.start()
    while not tunnel.ready:
        tunnel.receive(server.reply(data))
        data = tunnel.outgoing()
    assert server.selected == (offered[-1] if offered else None)


def test_handlers_pass_their_policy_to_the_connection(folder: Path) -> None:
    policy = TlsPolicy(NAME, bundle(folder))
    http = http_get.HttpTarget(HttpGet(443, scheme="HTTPS", tls=policy), "198.18.0.1")
    grpc = grpc_health.GrpcTarget(Grpc(443, mode="TLS", tls=policy), "198.18.0.1", 1.0)
    assert (http.hop.policy, grpc.hop.policy) == (policy, policy)


@pytest.mark.parametrize(
    ("location", "result"),
    [("https://198.18.0.1:8443/", None), ("http://198.18.0.1:80/", ProbeResult.FAILURE)],
)
def test_verified_probe_follows_no_redirect_to_http(
    location: str, result: ProbeResult | None, folder: Path
) -> None:
    policy = TlsPolicy(NAME, bundle(folder))
    target = http_get.HttpTarget(HttpGet(443, scheme="HTTPS", tls=policy), "198.18.0.1")
    exchange = target.exchange()
    exchange.start()
    head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    exchange.receive(head.encode())
    assert (exchange.verdict.result if exchange.verdict else None) is result
    if result is None:
        assert exchange.hop == exchanges.DialHop(8443, True, ("http/1.1",), policy)

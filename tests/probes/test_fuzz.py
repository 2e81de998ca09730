"""No bytes of a pod make an exchange raise, hang or grow; `make fuzz` runs these for longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.engine import hooks
from probes.protocols import grpc_health, http1, http_get, tls
from probes.protocols.exchanges import ConnectionFailure, Exchange, ExchangeTarget, Phase
from probes.spec import urls
from probes.spec.definitions import Grpc, HttpGet

ADDRESS = "10.0.0.1"

WORDS = st.sampled_from(
    [
        *(b"HTTP/1.1 ", b"HTTP/1.0 ", b"200 OK", b"302 F", b"100 Continue", b"204 No", b"\r\n"),
        *(b"\n", b"\r", b" ", b":", b"Location: ", b"Content-Length: ", b"Transfer-Encoding: "),
        *(b"chunked", b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffffffffffff\r\n", b"-1", b"/x"),
        *(b"http://10.0.0.1/", b"https://10.0.0.1:8443/", b"//10.0.0.1@evil/", b"%zz", b"\x00"),
        *(b"PRI * HTTP/2.0", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"HTTP/1.1 302 F\r\n"),
        *(b"Location: /x\r\n\r\n", b"Content-Length: 5\r\n\r\nhello", b"\x15\x03\x03\x00\x02"),
    ]
)
FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]),
    st.sampled_from([0, 1, 2, 3, 2**31 - 1]),
    st.binary(max_size=40) | st.just(b"\x88") | st.just(bytes(8)),
)
EXCHANGE = st.lists(WORDS | FRAMES | st.binary(max_size=30), max_size=30)
TARGETS: dict[str, ExchangeTarget] = {
    "http": http_get.HttpTarget(HttpGet(80), ADDRESS),
    "https": http_get.HttpTarget(HttpGet(80, scheme="HTTPS"), ADDRESS),
    "h2c": http_get.HttpTarget(HttpGet(80, protocol="HTTP2"), ADDRESS),
    "hook": hooks.HookTarget(HttpGet(80, scheme="HTTPS"), ADDRESS),
    "grpc": grpc_health.GrpcTarget(Grpc(80), ADDRESS, 1.0),
}


def converse(exchange: Exchange, pieces: list[bytes], end: ConnectionFailure | None) -> None:
    """As dialing.DialAttempt does it, over as many connections as the exchange needs."""
    hop = exchange.hop
    assert 0 <= hop.port <= 65535
    sent = exchange.start()
    dials = 1
    for piece in pieces:
        if exchange.verdict is not None:
            break
        sent += exchange.receive(piece)
        if exchange.hop is not hop:
            hop = exchange.hop
            assert 0 <= hop.port <= 65535
            dials += 1
            sent = exchange.start()
    if exchange.verdict is None:
        if end is None:
            exchange.receive(b"")
        else:
            exchange.fail(end)
    assert dials <= http_get.REQUESTS_MAX + 1
    assert len(sent) < 64 * 1024
    verdict = exchange.verdict
    if verdict is not None:
        verdict.message.encode()
        assert len(verdict.message) <= 2 * http1.BODY_MAX_BYTES


ENDS = st.sampled_from(
    [
        None,
        ConnectionFailure(Phase.EXCHANGE, "", timeout=True),
        ConnectionFailure(Phase.EXCHANGE, "read: reset by peer"),
    ]
)


@pytest.mark.parametrize("kind", TARGETS)
@given(pieces=EXCHANGE, end=ENDS)
def test_no_conversation_makes_an_exchange_raise(
    kind: str, pieces: list[bytes], end: ConnectionFailure | None
) -> None:
    converse(TARGETS[kind].exchange(), pieces, end)


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\x16\x03\x03", b"HTTP/1.1 400"])))
def test_no_bytes_make_tls_raise_anything_else(pieces: list[bytes]) -> None:
    tunnel = tls.TlsTunnel(())
    assert tunnel.start()
    try:
        for piece in pieces:
            tunnel.receive(piece)
    except tls.TlsError as error:
        assert str(error)  # noqa: PT017 - whether it is raised is not the question
    tunnel.close()


@given(st.text(st.characters(max_codepoint=255)), st.integers(1, 65535))
def test_no_path_changes_where_a_probe_goes(path: str, port: int) -> None:
    url = http_get.probe_url(HttpGet(port, path), ADDRESS)
    # An opaque path (`mailto:x`) leaves no place for an address, and is never sent.
    assert url.opaque or (url.hostname, url.port) == (ADDRESS, port)


@given(st.text(st.characters(max_codepoint=255)))
def test_a_redirect_is_followed_only_to_the_same_hostname(location: str) -> None:
    exchange = http_get.HttpTarget(HttpGet(80), ADDRESS).exchange()
    hop = exchange.hop
    exchange.start()
    line = urls.to_bytes_text(location).replace("\r", "").replace("\n", "")
    head = f"HTTP/1.1 302 F\r\nLocation: {line}\r\nContent-Length: 0\r\n\r\n"
    exchange.receive(head.encode("latin-1"))
    if exchange.hop is not hop:
        sent = exchange.start().decode("latin-1")
        host = sent.partition("\r\nHost: ")[2].partition("\r\n")[0]
        assert host.rpartition(":")[0] == ADDRESS or host == ADDRESS

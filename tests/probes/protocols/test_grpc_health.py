"""A grpc probe has the kubelet's results, with real servers and with any bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st

from probes.engine import prober
from probes.protocols import grpc_health, protobuf
from probes.protocols.exchanges import ConnectionFailure, DialHop, Phase
from probes.results import ExchangeResult, ProbeOutcome, ProbeResult
from probes.spec.definitions import TlsPolicy
from probes.spec.specs import Grpc, Probe
from tests import processes
from tests.probes import servers
from tests.probes.conftest import Sandbox

ENDPOINT = "10.0.0.1:50051"
GRPC = (("content-type", "application/grpc"),)
FAILED = "error: health rpc probe failed: rpc error: code ="
RESET = "stream terminated by RST_STREAM with error code:"
UNEXPECTED = "unexpected HTTP status code received from server:"


class Server:
    """An h2 server that answers one exchange."""

    def __init__(self, handler: Grpc | None = None, timeout_seconds: float = 1.0) -> None:
        target = grpc_health.GrpcTarget(handler or Grpc(50051), "10.0.0.1", timeout_seconds)
        self.exchange = target.exchange()
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.events = self.connection.receive_data(self.exchange.start())

    def settle(self) -> None:
        self.exchange.receive(self.connection.data_to_send())

    def answer(
        self,
        data: bytes = b"",
        *,
        status: int = 200,
        headers: tuple[tuple[str, str], ...] = GRPC,
        trailers: tuple[tuple[str, str], ...] | None = (("grpc-status", "0"),),
    ) -> ExchangeResult:
        connection = self.connection
        connection.send_headers(1, [(":status", str(status)), *headers])
        connection.send_data(1, data, end_stream=trailers is None)
        if trailers is not None:
            connection.send_headers(1, trailers, end_stream=True)
        return self.sent()

    def sent(self) -> ExchangeResult:
        self.exchange.receive(self.connection.data_to_send())
        assert self.exchange.verdict is not None
        return self.exchange.verdict


def response(status: int) -> bytes:
    message: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return grpc_health.frame(message)


def failure(text: str) -> ExchangeResult:
    return ExchangeResult(ProbeResult.FAILURE, text)


def test_request_is_that_of_the_kubelet() -> None:
    server = Server(Grpc(50051, "db"), timeout_seconds=2.0)
    (headers,) = (e for e in server.events if isinstance(e, h2.events.RequestReceived))
    (data,) = (e for e in server.events if isinstance(e, h2.events.DataReceived))
    assert {str(name): str(value) for name, value in headers.headers or ()} == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": ENDPOINT,
        "content-type": "application/grpc",
        "user-agent": "kube-probe/1.36",
        "te": "trailers",
        "grpc-timeout": "2000000u",
    }
    message = health_pb2.HealthCheckRequest(service="db").SerializeToString()
    assert data.data == grpc_health.frame(message)
    assert any(isinstance(event, h2.events.StreamEnded) for event in server.events)


def test_serving_is_success() -> None:
    assert Server().answer(response(1)) == ExchangeResult(ProbeResult.SUCCESS, "service healthy")


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (0, "UNKNOWN"),
        (2, "NOT_SERVING"),
        (3, "SERVICE_UNKNOWN"),
        (9, "9"),
        (127, "127"),
        (128, "128"),
    ],
)
def test_any_other_status_is_failure(status: int, name: str) -> None:
    assert Server().answer(response(status)) == failure(
        f'service unhealthy (responded with "{name}")'
    )


def test_server_without_the_health_service_is_reported() -> None:
    trailers = (("grpc-status", "12"), ("grpc-message", "unknown%20service"))
    assert Server().answer(trailers=trailers) == failure(
        "error: this server does not implement the grpc health protocol"
        " (grpc.health.v1.Health): unknown service"
    )


def test_unknown_service_is_a_failure() -> None:
    server = Server()
    server.connection.send_headers(
        1,
        [(":status", "200"), *GRPC, ("grpc-status", "5"), ("grpc-message", "no such %zz")],
        end_stream=True,
    )
    assert server.sent() == failure(
        "error: health rpc probe failed: rpc error: code = NotFound desc = no such %zz"
    )


def test_deadline_of_the_server_is_reported_as_the_probes() -> None:
    assert Server(timeout_seconds=2).answer(trailers=(("grpc-status", "4"),)) == failure(
        "timeout: health rpc did not complete within 2s"
    )


@pytest.mark.parametrize(
    ("status", "headers", "text"),
    [
        (
            *(404, GRPC),
            "error: this server does not implement the grpc health protocol"
            f" (grpc.health.v1.Health): {UNEXPECTED} 404",
        ),
        (503, GRPC, f"{FAILED} Unavailable desc = {UNEXPECTED} 503"),
        (
            *(200, (("content-type", "text/html"),)),
            f"{FAILED} Unknown desc = {UNEXPECTED} 200;"
            ' transport: received unexpected content-type "text/html"',
        ),
        (
            *(502, (("content-type", "é" + "x" * 70),)),
            f"{FAILED} Unavailable desc = {UNEXPECTED} 502;"
            rf' transport: received unexpected content-type "\xc3\xa9{"x" * 62}"',
        ),
        (
            *(200, ()),
            f"{FAILED} Unknown desc = {UNEXPECTED} 200;"
            " malformed header: missing HTTP content-type",
        ),
        (
            *(200, GRPC),
            f"{FAILED} Internal desc = server closed the stream without sending trailers",
        ),
    ],
)
def test_server_that_speaks_no_grpc_is_a_failure(
    status: int, headers: tuple[tuple[str, str], ...], text: str
) -> None:
    assert Server().answer(b"x", status=status, headers=headers, trailers=None) == failure(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("1", "Canceled desc = why"),
        ("16", "Unauthenticated desc = why"),
        ("17", "Code(17) desc = why"),
        ("9999999999", "Code(9999999999) desc = why"),
        ("10000000000", "Unknown desc = malformed grpc-status in the server's answer"),
        ("-1", "Unknown desc = malformed grpc-status in the server's answer"),
    ],
)
def test_status_of_the_call_is_reported_by_its_name(number: str, text: str) -> None:
    trailers = (("grpc-status", number), ("grpc-message", "why"))
    assert Server().answer(trailers=trailers) == failure(f"{FAILED} {text}")


def test_long_message_of_the_server_is_cut() -> None:
    trailers = (("grpc-status", "2"), ("grpc-message", "y" * 5000))
    assert Server().answer(trailers=trailers) == failure(f"{FAILED} Unknown desc = {'y' * 1024}")


def test_tls_is_that_of_the_probe_and_offers_http_2() -> None:
    policy = TlsPolicy("web.test")
    server = Server(Grpc(50051, mode="TLS", tls=policy))
    assert server.exchange.hop == DialHop(50051, True, ("h2",), policy)
    (headers,) = (e for e in server.events if isinstance(e, h2.events.RequestReceived))
    assert (":scheme", "https") in (headers.headers or ())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "Internal desc = cardinality violation: received no response message"),
        (
            b"\x01\0\0\0\x00",
            "Internal desc = the server sent a compressed response, which was not requested",
        ),
        (b"\0\0\0\0\x05x", "Internal desc = unexpected EOF"),
        (b"\0\0\0\0\x01\x08", "Internal desc = grpc: failed to unmarshal the received message"),
        (
            b"\0\x7f\xff\xff\xff",
            "ResourceExhausted desc = grpc: received message larger than max (2147483647 vs. 4096)",
        ),
        (
            b"\0\0\0\x0f\xfc" + b"\0" * 4092,
            "ResourceExhausted desc = grpc: received message larger than max (4092 vs. 4096)",
        ),
        (b"\0" * 70_000, "Internal desc = unexpected EOF"),
    ],
)
def test_bad_message_is_a_failure(data: bytes, text: str) -> None:
    server = Server()
    server.connection.send_headers(1, [(":status", "200"), *GRPC])
    for at in range(0, len(data), 16_000):
        if server.connection.local_flow_control_window(1) < 16_000:
            server.connection.receive_data(
                server.exchange.receive(server.connection.data_to_send())
            )
        server.connection.send_data(1, data[at : at + 16_000])
    server.connection.send_headers(1, [("grpc-status", "0")], end_stream=True)
    assert server.sent() == failure(f"{FAILED} {text}")


def test_message_may_be_as_long_as_the_maximum() -> None:
    unknown = protobuf.delimited(9, b"x" * (grpc_health.MESSAGE_MAX_BYTES - 5 - 5))
    verdict = Server().answer(grpc_health.frame(b"\x08\x01" + unknown))
    assert verdict.result is ProbeResult.SUCCESS


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, f"Internal desc = {RESET} NO_ERROR"),
        (7, f"Unavailable desc = {RESET} REFUSED_STREAM"),
        (2, f"Internal desc = {RESET} INTERNAL_ERROR"),
        (99, f"Internal desc = {RESET} unknown error code 99"),
    ],
)
def test_reset_stream_is_a_failure(code: int, text: str) -> None:
    server = Server()
    server.connection.reset_stream(1, code)
    assert server.sent() == failure(f"{FAILED} {text}")


def test_server_that_goes_away_is_a_failure() -> None:
    server = Server()
    server.settle()
    server.connection.close_connection(error_code=11, last_stream_id=0)
    assert server.sent() == failure(
        "error: health rpc probe failed: rpc error: code = Unavailable desc = "
        "error reading from server: the server went away (ENHANCE_YOUR_CALM)"
    )


def test_graceful_goodbye_does_not_end_a_call_that_is_still_answered() -> None:
    server = Server()
    server.settle()
    goaway = b"\0\0\x08\x07\0\0\0\0\0" + (1).to_bytes(4, "big") + bytes(4)
    server.exchange.receive(goaway)
    assert server.exchange.verdict is None
    assert server.answer(response(1)).result is ProbeResult.SUCCESS


def test_connect_timeout_is_reported_in_the_kubelets_words() -> None:
    server = Server()
    server.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "", timeout=True))
    assert server.exchange.verdict == failure(
        f'timeout: failed to connect service "{ENDPOINT}" within 1s: context deadline exceeded'
    )


def test_response_timeout_is_reported_in_the_kubelets_words() -> None:
    server = Server(timeout_seconds=2)
    server.settle()
    server.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "", timeout=True))
    assert server.exchange.verdict == failure("timeout: health rpc did not complete within 2s")


def test_connection_refused_is_reported_at_once() -> None:
    exchange = grpc_health.GrpcTarget(Grpc(50051), "10.0.0.1", 1.0).exchange()
    exchange.fail(
        ConnectionFailure(Phase.DIAL, "dial tcp 10.0.0.1:50051: connect: connection refused")
    )
    assert exchange.verdict == failure(
        f'timeout: failed to connect service "{ENDPOINT}" within 1s:'
        " dial tcp 10.0.0.1:50051: connect: connection refused"
    )


def test_other_protocol_is_no_connection() -> None:
    server = Server()
    server.exchange.receive(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    assert server.exchange.verdict == failure(
        f'timeout: failed to connect service "{ENDPOINT}" within 1s: error reading server preface:'
        " the frame header looked like an HTTP/1.1 header"
    )


def test_early_end_before_the_settings_is_no_connection() -> None:
    server = Server()
    server.exchange.receive(b"")
    assert server.exchange.verdict == failure(
        f'timeout: failed to connect service "{ENDPOINT}" within 1s:'
        " error reading server preface: EOF"
    )


def test_connection_that_breaks_after_the_settings_is_a_failure_of_the_call() -> None:
    server = Server()
    server.settle()
    server.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "read: connection reset by peer"))
    assert server.exchange.verdict == failure(
        f"{FAILED} Unavailable desc = error reading from server: read: connection reset by peer"
    )


def test_early_end_after_the_settings_is_a_failure() -> None:
    server = Server()
    server.settle()
    server.exchange.receive(b"")
    assert server.exchange.verdict == failure(
        "error: health rpc probe failed: rpc error: code = Unavailable desc ="
        " error reading from server: EOF"
    )


@given(st.binary(max_size=200), st.booleans(), st.integers(1, 40))
def test_no_bytes_make_an_exchange_raise(data: bytes, settled: bool, size: int) -> None:
    server = Server()
    if settled:
        server.settle()
    for at in range(0, len(data), size):
        server.exchange.receive(data[at : at + size])
        if server.exchange.verdict is not None:
            break
    else:
        server.exchange.receive(b"")
    assert server.exchange.verdict is not None
    assert server.exchange.verdict.result is ProbeResult.FAILURE


FRAME = st.builds(
    lambda kind, flags, stream, body: (
        len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body
    ),
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]),
    st.sampled_from([0, 1, 2, 3, 2**31 - 1]),
    st.binary(max_size=40),
)


@given(st.lists(FRAME, max_size=12), st.booleans())
def test_no_frames_make_an_exchange_raise(frames: list[bytes], settled: bool) -> None:
    server = Server()
    if settled:
        server.settle()
    for data in frames:
        if server.exchange.verdict is None:
            server.exchange.receive(data)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_request_message_is_protobufs(service: str) -> None:
    expected = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    assert grpc_health.encode_request(service) == expected


@given(st.integers(-(2**31), 2**31 - 1))
def test_response_message_is_protobufs(status: int) -> None:
    assert grpc_health.decode_response(response(status)[5:]) == status


@given(st.binary())
def test_message_is_decoded_as_by_protobuf_or_rejected(data: bytes) -> None:
    try:
        status = grpc_health.decode_response(data)
    except grpc_health.GrpcError:
        return
    message = health_pb2.HealthCheckResponse()
    message.ParseFromString(data)
    assert message.status == status


SERVING = b"\x08\x01"
NINE = b"\xff" * 9


@pytest.mark.parametrize(
    "data",
    [
        b"\x11" + b"8 octets",
        b"\x15" + b"four",
        b"\x12\x03" + b"abc",
        b"\x10" + NINE + b"\x01",
        b"\xf8\xff\xff\xff\x0f\x05",
    ],
)
def test_unknown_field_is_skipped_wherever_it_is(data: bytes) -> None:
    assert grpc_health.decode_response(SERVING + data) == 1
    assert grpc_health.decode_response(data + SERVING) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x11" + b"seven o",
        b"\x15" + b"thr",
        b"\x12\x03" + b"ab",
        b"\x10",
        b"\x10" + NINE + b"\x02",
        b"\x10" + NINE + b"\x81\x00",
        b"\x00\x01",
        b"\x07\x01",
        b"\x13\x14",
        b"\x80\x80\x80\x80\x10\x05",
        b"\x10" + b"\x80" * 9 + b"\x02",
    ],
)
def test_field_that_is_cut_off_or_invalid_is_rejected(data: bytes) -> None:
    for message in (data, SERVING + data):
        with pytest.raises(grpc_health.GrpcError, match="failed to unmarshal"):
            grpc_health.decode_response(message)


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (1, b"1000000u"),
        (0.0000001, b"1u"),
        (99.999999, b"99999999u"),
        (100, b"100000m"),
        (99_999.999, b"99999999m"),
        (100_000, b"100000S"),
        (1e6, b"1000000S"),
    ],
)
def test_timeout_header_has_eight_digits_at_most(seconds: float, header: bytes) -> None:
    assert grpc_health.encode_timeout(seconds) == header


@contextmanager
def grpcio(sandbox: Sandbox, address: str, *files: Path) -> Iterator[None]:
    command = [
        *("nsenter", f"--net={sandbox.path}", sys.executable),
        *("-m", "tests.probes.grpc_server", address, *map(str, files)),
    ]
    with processes.served(command):
        yield


@pytest.fixture(scope="module")
def health_server(shared_sandbox: Sandbox) -> Iterator[Sandbox]:
    with grpcio(shared_sandbox, "[::]:50051"):
        yield shared_sandbox


async def run_probe(sandbox: Sandbox, handler: Grpc, *addresses: str) -> ProbeOutcome:
    return await prober.probe(
        Probe(handler, timeout_seconds=10.0),
        netns=sandbox.netns,
        addresses=addresses or (sandbox.v4,),
    )


@pytest.mark.kernel
@pytest.mark.parametrize("address", ["198.18.0.1", "fd00:18::1"])
async def test_real_server_is_healthy(health_server: Sandbox, address: str) -> None:
    outcome = await run_probe(health_server, Grpc(50051), address)
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "service healthy")


@pytest.mark.kernel
async def test_real_server_with_an_ill_service(health_server: Sandbox) -> None:
    outcome = await run_probe(health_server, Grpc(50051, "ill"))
    assert outcome.message == 'service unhealthy (responded with "NOT_SERVING")'


@pytest.mark.kernel
async def test_real_server_without_that_service(health_server: Sandbox) -> None:
    outcome = await run_probe(health_server, Grpc(50051, "nothing"))
    assert outcome.result is ProbeResult.FAILURE
    assert "code = NotFound" in outcome.message


@pytest.mark.kernel
async def test_real_server_without_health_checking(shared_sandbox: Sandbox) -> None:
    with grpcio(shared_sandbox, "198.18.0.1:50052"):
        outcome = await run_probe(shared_sandbox, Grpc(50052))
    assert outcome.message.startswith(
        "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): "
    )


@pytest.mark.kernel
async def test_real_server_with_tls(shared_sandbox: Sandbox, tmp_path: Path) -> None:
    with grpcio(shared_sandbox, "198.18.0.1:50053", *servers.certificate(tmp_path)):
        outcome = await run_probe(shared_sandbox, Grpc(50053, mode="TLS"))
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "service healthy")


@pytest.mark.kernel
async def test_http_server_is_no_grpc_server(shared_sandbox: Sandbox) -> None:
    said = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    async with servers.serving(shared_sandbox.listen(), servers.saying(said)) as port:
        outcome = await run_probe(shared_sandbox, Grpc(port))
    assert outcome.result is ProbeResult.FAILURE
    assert f'failed to connect service "198.18.0.1:{port}" within 10s' in outcome.message

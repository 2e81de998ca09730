"""An httpGet probe with `protocol: HTTP2` means the same over h2c."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.engine import prober
from probes.protocols import h2c, http1_requests, http_get
from probes.protocols.http1_errors import HttpError
from probes.results import ExchangeResult, ProbeOutcome, ProbeResult
from probes.spec.specs import HttpGet, Probe
from tests.probes import servers
from tests.probes.conftest import Sandbox

URL = "http://10.0.0.1:80/"


def server_side() -> h2.connection.H2Connection:
    config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    return connection


class Talk:
    """One exchange and the h2 servers that it meets, one a connection."""

    def __init__(self, headers: tuple[tuple[str, str], ...] = ()) -> None:
        handler = HttpGet(80, "/x?y", headers=headers, protocol="HTTP2")
        self.exchange = http_get.HttpTarget(handler, "10.0.0.1").exchange()
        self.connect()

    def connect(self) -> None:
        self.server = server_side()
        self.events = self.server.receive_data(self.exchange.start())

    @property
    def request(self) -> dict[str, str]:
        (event,) = (e for e in self.events if isinstance(e, h2.events.RequestReceived))
        return {str(name): str(value) for name, value in event.headers or ()}

    def answer(self, status: int, *headers: tuple[str, str], body: bytes = b"") -> None:
        self.server.send_headers(1, [(":status", str(status)), *headers])
        self.server.send_data(1, body, end_stream=True)
        self.exchange.receive(self.server.data_to_send())

    @property
    def verdict(self) -> ExchangeResult:
        assert self.exchange.verdict is not None
        return self.exchange.verdict


@pytest.mark.parametrize("value", ["a\r\nB: c", "a\nb", "a\0", "a\x7f"])
def test_nothing_is_smuggled_into_a_request(value: str) -> None:
    headers = (("X-B", "fine"), ("X-A", value))
    with pytest.raises(HttpError, match='invalid header field value for "X-A"'):
        h2c.get_request("/", "h", http1_requests.request_headers(headers, "agent"))


def test_request_has_the_headers_of_a_probe() -> None:
    assert Talk((("X-A", "1"), ("Connection", "keep-alive"))).request == {
        ":authority": "10.0.0.1:80",
        ":method": "GET",
        ":path": "/x?y",
        ":scheme": "http",
        "user-agent": "kube-probe/1.36",
        "accept": "*/*",
        "x-a": "1",
    }


def test_headers_are_sent_in_order_and_those_of_connections_are_left_out() -> None:
    talk = Talk(
        (
            *(("X-B", " 2 "), ("User-Agent", " me "), ("X-A", "é"), ("X-B", "3")),
            *(("Upgrade", "x"), ("Keep-Alive", "x"), ("Transfer-Encoding", "x")),
        )
    )
    (event,) = (e for e in talk.events if isinstance(e, h2.events.RequestReceived))
    assert [(str(name), str(value)) for name, value in event.headers or ()][4:] == [
        ("user-agent", "me"),
        ("accept", "*/*"),
        ("x-a", "é"),
        ("x-b", "2"),
        ("x-b", "3"),
    ]
    assert "user-agent" not in Talk((("User-Agent", " "),)).request


@pytest.mark.parametrize("status", ["20", "2000", "2x0"])
def test_status_that_is_no_number_of_three_digits_is_a_failure(status: str) -> None:
    talk = Talk()
    talk.server.send_headers(1, [(":status", status)], end_stream=True)
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.verdict == ExchangeResult(
        ProbeResult.FAILURE,
        f'Get "{URL}x?y": malformed response from server: malformed non-numeric status',
    )


def test_answer_is_complete_with_its_last_frame() -> None:
    talk = Talk()
    talk.server.send_headers(1, [(":status", "200")])
    talk.server.send_data(1, b"half")
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.exchange.verdict is None
    talk.server.send_data(1, b" and half", end_stream=True)
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.verdict == ExchangeResult(ProbeResult.SUCCESS, "half and half")


def test_host_header_becomes_the_authority() -> None:
    assert Talk((("Host", "www.test"),)).request[":authority"] == "www.test"


def test_success_has_the_body() -> None:
    talk = Talk()
    talk.answer(200, body=b"fine")
    assert talk.verdict == ExchangeResult(ProbeResult.SUCCESS, "fine")


def test_other_codes_are_failures() -> None:
    talk = Talk()
    talk.answer(503, body=b"secret")
    assert talk.verdict == ExchangeResult(
        ProbeResult.FAILURE, "HTTP probe failed with statuscode: 503"
    )


def test_redirect_within_the_pod_is_followed() -> None:
    talk = Talk()
    first = talk.exchange.hop
    talk.answer(302, ("location", "http://10.0.0.1:81/there"))
    assert talk.exchange.hop is not first
    talk.connect()
    assert (talk.exchange.hop.port, talk.request[":path"]) == (81, "/there")
    talk.answer(200)
    assert talk.verdict.result is ProbeResult.SUCCESS


def test_redirect_to_another_host_is_a_warning() -> None:
    talk = Talk()
    talk.answer(302, ("location", "http://10.0.0.2/"))
    assert talk.verdict.result is ProbeResult.WARNING


def test_redirect_to_https_cannot_be_followed() -> None:
    talk = Talk()
    talk.answer(302, ("location", "https://10.0.0.1/"))
    assert 'unsupported protocol scheme "https"' in talk.verdict.message


def test_body_is_cut_at_ten_kibibytes() -> None:
    talk = Talk()
    talk.server.send_headers(1, [(":status", "200")])
    talk.server.send_data(1, b"x" * 12_000)
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.verdict == ExchangeResult(ProbeResult.SUCCESS, "x" * 10_240)


def test_answer_of_too_many_frames_is_a_failure() -> None:
    """A frame of nothing costs as much as one of 16 KiB: else half a second for 500 KiB."""
    talk = Talk()
    talk.exchange.receive(talk.server.data_to_send())
    pings = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
    talk.exchange.receive(pings * 2000)
    assert talk.verdict.message.endswith("http2: the answer has more than 500 frames")


def test_reset_before_an_answer_is_a_failure() -> None:
    talk = Talk()
    talk.server.reset_stream(1, 7)
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.verdict.message.endswith(
        "stream error: stream ID 1; REFUSED_STREAM; received from peer"
    )
    assert not talk.verdict.error


def test_reset_in_the_body_is_a_prober_error() -> None:
    talk = Talk()
    talk.server.send_headers(1, [(":status", "200")])
    talk.server.reset_stream(1, 2)
    talk.exchange.receive(talk.server.data_to_send())
    assert talk.verdict.error


def test_server_of_http_1_is_a_failure() -> None:
    talk = Talk()
    talk.exchange.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert "http2: the frame header looked like an HTTP/1.1 header" in talk.verdict.message


def test_early_end_is_a_failure() -> None:
    talk = Talk()
    talk.exchange.receive(b"")
    assert talk.verdict == ExchangeResult(
        ProbeResult.FAILURE, 'Get "http://10.0.0.1:80/x?y": unexpected EOF'
    )


@given(st.binary(max_size=100), st.booleans(), st.integers(1, 30))
def test_no_bytes_make_an_exchange_raise(data: bytes, settled: bool, size: int) -> None:
    talk = Talk()
    if settled:
        talk.exchange.receive(talk.server.data_to_send())
    for at in range(0, len(data), size):
        if talk.exchange.verdict is None:
            talk.exchange.receive(data[at : at + size])


async def h2_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = server_side()
    writer.write(connection.data_to_send())
    while data := await reader.read(65536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                connection.send_headers(1, [(":status", "200")])
                connection.send_data(1, b"over h2c", end_stream=True)
        writer.write(connection.data_to_send())
        await writer.drain()


@pytest.mark.kernel
async def test_probe_of_a_server(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), h2_server) as port:
        outcome: ProbeOutcome = await prober.probe(
            Probe(HttpGet(port, protocol="HTTP2"), timeout_seconds=5.0),
            netns=shared_sandbox.netns,
            addresses=[shared_sandbox.v4],
        )
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "over h2c")

"""An httpGet probe sends, follows and evaluates as the kubelet's does."""

from __future__ import annotations

import base64
from typing import Literal

import pytest

from probes.protocols import exchanges, http_get
from probes.protocols.exchanges import ConnectionFailure, Phase
from probes.results import ExchangeResult, ProbeResult
from probes.spec.definitions import TlsPolicy
from probes.spec.specs import HttpGet

ADDRESS = "10.0.0.1"
URL = "http://10.0.0.1:80/"


def answer(status: int, *headers: str, body: str = "") -> bytes:
    lines = [f"HTTP/1.1 {status} Text", f"Content-Length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines).encode()


class Talk:
    """Runs an exchange against scripted answers, one a connection."""

    def __init__(self, handler: HttpGet, *answers: bytes, address: str = ADDRESS) -> None:
        self.exchange = http_get.HttpTarget(handler, address).exchange()
        self.requests: list[bytes] = []
        self.hops: list[exchanges.DialHop] = []
        for data in answers:
            hop = self.exchange.hop
            self.hops.append(hop)
            self.requests.append(self.exchange.start())
            self.exchange.receive(data)
            if self.exchange.hop is hop:
                break

    @property
    def verdict(self) -> ExchangeResult:
        assert self.exchange.verdict is not None
        return self.exchange.verdict

    def line(self, index: int = -1) -> str:
        return self.requests[index].decode().split("\r\n")[0]

    def headers(self, index: int = -1) -> dict[str, str]:
        lines = self.requests[index].decode().split("\r\n")[1:-2]
        return dict(line.split(": ", 1) for line in lines)


def talk(
    *answers: bytes,
    path: str = "/",
    scheme: Literal["HTTP", "HTTPS"] = "HTTP",
    headers: tuple[tuple[str, str], ...] = (),
) -> Talk:
    return Talk(HttpGet(80, path, scheme, headers), *answers)


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_two_hundreds_are_success(status: int) -> None:
    assert talk(answer(status)).verdict == ExchangeResult(ProbeResult.SUCCESS, "")


@pytest.mark.parametrize("status", [101, 400, 404, 500, 503, 999])
def test_other_codes_are_failures_without_the_body(status: int) -> None:
    assert talk(answer(status, body="secret")).verdict == ExchangeResult(
        ProbeResult.FAILURE, f"HTTP probe failed with statuscode: {status}"
    )


@pytest.mark.parametrize(
    ("status", "is_healthy"), [(200, False), (204, True), (418, True), (420, True), (421, False)]
)
def test_named_statuses_alone_are_healthy(status: int, is_healthy: bool) -> None:
    handler = HttpGet(80, statuses=((204, 204), (418, 420)))
    found = Talk(handler, answer(status, body="secret")).verdict
    assert found.result.passed is is_healthy
    if not is_healthy:
        assert found.message == f"HTTP probe failed with statuscode: {status}"


def test_redirect_with_a_named_status_is_not_followed() -> None:
    handler = HttpGet(80, statuses=((302, 302),))
    seen = Talk(handler, answer(302, "Location: /x"), answer(500))
    assert (seen.verdict.result, len(seen.requests)) == (ProbeResult.SUCCESS, 1)
    other = Talk(handler, answer(301, "Location: /x"), answer(302, "Location: /y"))
    assert (other.verdict.result, len(other.requests)) == (ProbeResult.SUCCESS, 2)


@pytest.mark.parametrize(("body", "is_healthy"), [("all is ok", True), ("OK", False), ("", False)])
def test_body_must_contain_the_text_that_the_probe_names(body: str, is_healthy: bool) -> None:
    found = Talk(HttpGet(80, body_contains="ok"), answer(200, body=body)).verdict
    assert found.result.passed is is_healthy
    if not is_healthy:
        text = "HTTP probe failed: the body lacks the text that the probe requires"
        assert found.message == text


def test_only_the_first_ten_kilobytes_of_the_body_count() -> None:
    handler = HttpGet(80, body_contains="ok")
    assert Talk(handler, answer(200, body="x" * 10238 + "ok")).verdict.result.passed
    assert not Talk(handler, answer(200, body="x" * 10239 + "ok")).verdict.result.passed


def test_text_of_the_body_does_not_make_an_error_healthy() -> None:
    found = Talk(HttpGet(80, body_contains="ok"), answer(500, body="ok")).verdict
    assert found.message == "HTTP probe failed with statuscode: 500"


def test_body_is_the_text_of_a_success() -> None:
    assert talk(answer(200, body="fine")).verdict == ExchangeResult(ProbeResult.SUCCESS, "fine")


@pytest.mark.parametrize("status", [300, 304, 305, 399])
def test_three_hundred_that_is_no_redirect_is_a_warning(status: int) -> None:
    assert talk(answer(status, "Location: /x")).verdict == ExchangeResult(
        ProbeResult.WARNING, "Probe terminated redirects, Response body: "
    )


def test_redirect_without_location_is_a_warning() -> None:
    assert talk(answer(302, body="b")).verdict == ExchangeResult(
        ProbeResult.WARNING, "Probe terminated redirects, Response body: b"
    )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/x", "x", "http://10.0.0.1/x", "//10.0.0.1:80/x"])
def test_redirect_within_the_pod_is_followed(status: int, location: str) -> None:
    seen = talk(answer(status, f"Location: {location}"), answer(200, body="there"))
    assert seen.line() == "GET /x HTTP/1.1"
    assert seen.verdict == ExchangeResult(ProbeResult.SUCCESS, "there")


def test_redirect_is_followed_without_waiting_for_its_body() -> None:
    seen = talk(b"HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 9999\r\n\r\n", answer(200))
    assert seen.verdict.result is ProbeResult.SUCCESS


def test_redirect_to_an_ill_page_is_a_failure() -> None:
    seen = talk(answer(302, "Location: /x"), answer(500))
    assert seen.verdict == ExchangeResult(
        ProbeResult.FAILURE, "HTTP probe failed with statuscode: 500"
    )


@pytest.mark.parametrize(
    ("status", "result"), [(200, ProbeResult.SUCCESS), (500, ProbeResult.FAILURE)]
)
def test_redirect_to_another_port_of_the_pod_is_followed(status: int, result: ProbeResult) -> None:
    seen = talk(answer(302, "Location: http://10.0.0.1:8443/"), answer(status))
    assert seen.hops[1] == exchanges.DialHop(8443)
    assert seen.verdict.result is result


def test_redirect_to_port_zero_is_dialled_there() -> None:
    seen = talk(answer(302, "Location: http://10.0.0.1:0/"))
    assert (seen.exchange.verdict, seen.exchange.hop) == (None, exchanges.DialHop(0))


def test_redirect_to_https_is_followed() -> None:
    seen = talk(answer(302, "Location: https://10.0.0.1/"), answer(200))
    assert (seen.hops[1].port, seen.hops[1].tls) == (443, True)


@pytest.mark.parametrize(
    "location",
    ["http://10.0.0.2/", "http://example.test/", "//other/x", "mailto:a@b", "http:///x"],
)
def test_redirect_to_another_host_is_a_warning_and_never_dialled(location: str) -> None:
    seen = talk(answer(302, f"Location: {location}", body="go"), answer(200))
    assert len(seen.requests) == 1
    assert seen.verdict == ExchangeResult(
        ProbeResult.WARNING, "Probe terminated redirects, Response body: go"
    )


def test_host_of_the_first_request_counts_not_of_the_last() -> None:
    seen = talk(answer(302, "Location: http://10.0.0.1:81/"), answer(302, "Location: //evil/"))
    assert seen.verdict.result is ProbeResult.WARNING


def test_redirect_loop_is_a_failure_after_ten_requests() -> None:
    seen = talk(*[answer(302, "Location: /loop")] * 20)
    assert len(seen.requests) == 10
    assert seen.verdict == ExchangeResult(
        ProbeResult.FAILURE, 'Get "/loop": stopped after 10 redirects'
    )


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (
            "/%zz",
            f'Get "{URL}": failed to parse Location header "/%zz":'
            ' parse "/%zz": invalid URL escape "%zz"',
        ),
        ("ftp://10.0.0.1/", 'Get "ftp://10.0.0.1/": unsupported protocol scheme "ftp"'),
        (
            "http://10.0.0.1:99999/",
            'Get "http://10.0.0.1:99999/": dial tcp: address 99999: invalid port',
        ),
    ],
)
def test_redirect_that_cannot_be_followed_is_a_failure(location: str, words: str) -> None:
    verdict = talk(answer(302, f"Location: {location}")).verdict
    assert verdict == ExchangeResult(ProbeResult.FAILURE, words)


@pytest.mark.parametrize(
    ("head", "body_bytes", "is_followed"),
    [
        ("Content-Length: 2048", 2047, False),
        ("Content-Length: 2048", 2048, True),
        ("Content-Length: 2049", 0, True),
        ("X: y", 2047, False),
        ("X: y", 2048, True),
    ],
)
def test_two_kibibytes_of_a_redirect_are_read_before_it_is_followed(
    head: str, body_bytes: int, is_followed: bool
) -> None:
    data = f"HTTP/1.1 302 F\r\nLocation: /x\r\n{head}\r\n\r\n" + "b" * body_bytes
    exchange = http_get.HttpTarget(HttpGet(80), ADDRESS).exchange()
    hop = exchange.hop
    exchange.start()
    exchange.receive(data.encode())
    assert (exchange.hop is not hop, exchange.verdict) == (is_followed, None)


def test_redirect_whose_body_breaks_off_is_followed() -> None:
    data = b"HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 9\r\n\r\nb"
    exchange = http_get.HttpTarget(HttpGet(80), ADDRESS).exchange()
    exchange.start()
    exchange.receive(data)
    exchange.receive(b"")
    assert exchange.verdict is None
    assert exchange.start().startswith(b"GET /x ")


def test_time_over_in_the_body_of_a_redirect_is_that_of_the_next_request() -> None:
    seen = talk(b"HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 9\r\n\r\nb")
    seen.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "", timeout=True))
    assert seen.verdict == ExchangeResult(
        ProbeResult.FAILURE,
        f'Get "{URL}x": context deadline exceeded (Client.Timeout exceeded while awaiting headers)',
    )


@pytest.mark.parametrize(
    ("policy", "is_followed"),
    [(None, True), (TlsPolicy("web.test"), True), (TlsPolicy("web.test", "PEM"), False)],
)
def test_verified_probe_is_not_led_to_plain_http(
    policy: TlsPolicy | None, is_followed: bool
) -> None:
    handler = HttpGet(443, scheme="HTTPS", tls=policy)
    seen = Talk(handler, answer(302, "Location: http://10.0.0.1/"), answer(200))
    assert seen.verdict.result.passed is is_followed
    if not is_followed:
        assert seen.verdict.message == 'Get "http://10.0.0.1/": unsupported protocol scheme "http"'
    again = Talk(handler, answer(302, "Location: https://10.0.0.1:81/"), answer(200))
    assert again.verdict.result is ProbeResult.SUCCESS
    assert again.hops[1] == exchanges.DialHop(81, True, ("http/1.1",), policy)


@pytest.mark.parametrize(
    ("headers", "name", "value"),
    [
        ((("Referer", "mine"),), "Referer", "mine"),
        ((("Referer", ""),), "Referer", "http://10.0.0.1:80/"),
        ((("Authorization", "Bearer t"),), "Authorization", "Bearer t"),
        ((("Authorization", ""),), "Authorization", "Basic bWU6c2VjcmV0"),
    ],
)
def test_headers_of_the_probe_replace_those_of_the_client(
    headers: tuple[tuple[str, str], ...], name: str, value: str
) -> None:
    to = "Location: //me:secret@10.0.0.1/x"
    seen = talk(answer(302, to), answer(200), path="//me:secret@h/", headers=headers)
    assert seen.headers()[name] == value


def test_user_without_a_password_is_shown_in_a_failure() -> None:
    assert talk(b"x\n", path="//%6de@h/").verdict.message.startswith(
        'Get "http://me@10.0.0.1:80/": '
    )


def test_connection_that_breaks_in_the_head_is_a_failure() -> None:
    seen = talk(b"HTTP/1.1 200 OK\r\nA: b\r\n")
    seen.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "read: reset"))
    assert seen.verdict.message.startswith(f'Get "{URL}": net/http: HTTP/1.x transport')
    body = talk(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")
    body.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "read: reset"))
    assert body.verdict == ExchangeResult(ProbeResult.FAILURE, "read: reset", error=True)


def test_host_header_replaces_the_address_in_the_request_only() -> None:
    seen = talk(answer(200), headers=(("host", "www.test"),))
    assert seen.headers() == {
        "Host": "www.test",
        "User-Agent": "kube-probe/1.36",
        "Accept": "*/*",
        "Connection": "close",
    }
    assert seen.hops[0] == exchanges.DialHop(80)


def test_host_header_is_kept_over_a_redirect_on_the_same_host() -> None:
    seen = talk(answer(302, "Location: /x"), answer(200), headers=(("Host", "www.test"),))
    assert seen.headers()["Host"] == "www.test"


def test_host_header_is_dropped_when_the_redirect_names_the_host() -> None:
    seen = talk(
        answer(302, "Location: http://10.0.0.1/x"), answer(200), headers=(("Host", "www.test"),)
    )
    assert seen.headers()["Host"] == "10.0.0.1"


def test_headers_go_along_with_redirects() -> None:
    headers = (("Authorization", "Bearer t"), ("X-A", "1"))
    seen = talk(answer(302, "Location: /x"), answer(200), headers=headers)
    assert seen.headers() == {
        **seen.headers(0),
        "Referer": "http://10.0.0.1:80/",
    }


def test_referer_does_not_leave_https() -> None:
    seen = talk(answer(302, "Location: http://10.0.0.1/"), answer(200), scheme="HTTPS")
    assert "Referer" not in seen.headers()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("healthz", "GET /healthz HTTP/1.1"),
        ("/a?b=c", "GET /a?b=c HTTP/1.1"),
        ("/%zz?a", "GET /%25zz%3Fa HTTP/1.1"),
        ("/a\r\nX: y", "GET /a%0D%0AX:%20y HTTP/1.1"),
        ("http://evil.test:99/x", "GET /x HTTP/1.1"),
        ("//evil.test/x", "GET /x HTTP/1.1"),
    ],
)
def test_path_is_sent_but_never_changes_where(path: str, line: str) -> None:
    seen = talk(answer(200), path=path)
    assert seen.line() == line
    assert seen.headers()["Host"] == "10.0.0.1:80"
    assert seen.hops[0] == exchanges.DialHop(80)


def test_user_in_the_path_becomes_basic_authorization() -> None:
    seen = talk(answer(200), path="//me:a%20b@h/")
    assert seen.headers()["Authorization"] == "Basic " + base64.b64encode(b"me:a b").decode()


def test_password_is_not_shown_in_a_failure() -> None:
    seen = talk(b"nonsense\n", path="//me:secret@h/")
    assert "secret" not in seen.verdict.message
    assert "me:***@" in seen.verdict.message


def test_ipv6_address_is_bracketed() -> None:
    seen = Talk(HttpGet(80), answer(302, "Location: http://[fd00::1]:81/"), address="fd00::1")
    assert seen.headers()["Host"] == "[fd00::1]:80"
    assert seen.exchange.hop.port == 81


def test_https_offers_http_1_1_only() -> None:
    hop = http_get.HttpTarget(HttpGet(443, scheme="HTTPS"), ADDRESS).exchange().hop
    assert hop == exchanges.DialHop(443, True, ("http/1.1",))


def test_header_value_that_cannot_be_sent_is_a_failure() -> None:
    seen = talk(headers=(("X-A", "a\nb"),))
    assert seen.verdict == ExchangeResult(
        ProbeResult.FAILURE, f'Get "{URL}": net/http: invalid header field value for "X-A"'
    )


def test_path_without_a_place_for_the_host_is_a_failure() -> None:
    assert talk(path="mailto:x").verdict == ExchangeResult(
        ProbeResult.FAILURE, 'Get "http:x": http: no Host in request URL'
    )


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"", "EOF"),
        (b"HTTP/1.1 200", "net/http: HTTP/1.x transport connection broken: unexpected EOF"),
    ],
)
def test_early_end_is_a_failure(sent: bytes, text: str) -> None:
    exchange = http_get.HttpTarget(HttpGet(80), ADDRESS).exchange()
    exchange.start()
    if sent:
        exchange.receive(sent)
    exchange.receive(b"")
    assert exchange.verdict == ExchangeResult(ProbeResult.FAILURE, f'Get "{URL}": {text}')


def test_another_protocol_is_a_failure_at_its_first_bytes() -> None:
    assert talk(b"SSH-2.0-x\r\n").verdict == ExchangeResult(
        ProbeResult.FAILURE,
        f'Get "{URL}": net/http: HTTP/1.x transport connection broken:'
        ' malformed HTTP response "SSH-2.0-x"',
    )


def test_body_that_breaks_off_is_a_prober_error() -> None:
    seen = talk(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")
    seen.exchange.receive(b"")
    assert seen.verdict == ExchangeResult(ProbeResult.FAILURE, "unexpected EOF", error=True)


def test_time_over_in_the_body_is_a_prober_error() -> None:
    seen = talk(b"HTTP/1.1 500 Ill\r\nContent-Length: 9\r\n\r\nok")
    seen.exchange.fail(ConnectionFailure(Phase.EXCHANGE, "", timeout=True))
    assert seen.verdict == ExchangeResult(
        ProbeResult.FAILURE,
        "context deadline exceeded (Client.Timeout or context cancellation while reading body)",
        error=True,
    )


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (
            ConnectionFailure(Phase.DIAL, "dial tcp 10.0.0.1:80: connect: connection refused"),
            "dial tcp 10.0.0.1:80: connect: connection refused",
        ),
        (
            ConnectionFailure(Phase.DIAL, "dial tcp 10.0.0.1:80", timeout=True),
            "context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
        ),
        (
            ConnectionFailure(Phase.EXCHANGE, "", timeout=True),
            "context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
        ),
    ],
)
def test_transport_errors_are_failures(broken: ConnectionFailure, text: str) -> None:
    exchange = http_get.HttpTarget(HttpGet(80), ADDRESS).exchange()
    exchange.fail(broken)
    assert exchange.verdict == ExchangeResult(ProbeResult.FAILURE, f'Get "{URL}": {text}')


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "1s"),
        (1.5, "1.5s"),
        (0.5, "500ms"),
        (0.0015, "1.5ms"),
        (0.00005, "50µs"),
        (0.000999, "999µs"),
        (0.001, "1ms"),
        (60, "1m0s"),
        (3661.25, "1h1m1.25s"),
        (0, "0s"),
    ],
)
def test_durations_are_spelt_as_in_go(seconds: float, text: str) -> None:
    assert exchanges.go_duration(seconds) == text

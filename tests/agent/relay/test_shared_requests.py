"""Requests to an address of several pods: each belongs to the pod whose probe or hook it is."""

import ipaddress

import pytest

from agent.relay.messages import SharedRequest, Sharing
from agent.relay.shared_requests import HEAD_MAX_BYTES, SharedPorts, is_complete
from probes.engine import hooks
from probes.protocols.http_get import PROBE_CLIENT, HttpClientProfile, HttpTarget
from probes.spec.specs import HttpGet

ONE, SIX = "198.18.1.1", "fd00:18::1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sent(
    path: str = "/",
    *headers: tuple[str, str],
    port: int = 8080,
    address: str = ONE,
    client: HttpClientProfile = PROBE_CLIENT,
) -> bytes:
    request = HttpTarget(HttpGet(port, path, headers=headers), address, client).request
    assert isinstance(request, bytes)
    return request


def behind(request: bytes, path: str, referer: str) -> bytes:
    """The request behind a redirect, as Go's client sends it."""
    _, _, rest = request.partition(b"\r\n")
    line = f"GET {path} HTTP/1.1\r\n".encode()
    return line + rest.removesuffix(b"\r\n") + f"Referer: {referer}\r\n\r\n".encode()


def shared(
    *requests: tuple[int, bytes, str], address: str = ONE, clock: Clock | None = None
) -> SharedPorts:
    """requests: port, bytes and the target's key."""
    sharing = Sharing((8080, 0), tuple(SharedRequest(*one) for one in requests), otherwise="a")
    return SharedPorts(ipaddress.ip_address(address), sharing, clock or Clock())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sent("/a"), sent("/b")),
        (sent("/?pod=a"), sent("/?pod=b")),
        (sent("/", ("Host", "a")), sent("/", ("Host", "b"))),
        (sent("/", ("X-Pod", "a")), sent("/")),
        (sent("/"), sent("/", client=hooks.CLIENT)),
    ],
    ids=["path", "query", "host", "header", "hook"],
)
def test_each_request_belongs_to_its_pod(one: bytes, other: bytes) -> None:
    ports = shared((8080, one, "a"), (8080, other, "b"))
    assert ports.key_of(8080, one) == "a"
    assert ports.key_of(8080, other) == "b"
    assert ports.key_of(8081, one) is None
    assert ports.keys == ["a", "b"]


def test_version_of_the_kubelet_and_order_of_headers_do_not_count() -> None:
    known = sent("/a", ("X-B", "1"), client=hooks.CLIENT)
    ports = shared((8080, known, "a"), (8080, sent("/b"), "b"))
    received = (
        b"GET /a HTTP/1.1\r\nHost: 198.18.1.1:8080\r\nUser-Agent: kube-lifecycle/1.40+\r\n"
        b"Accept: */*\r\nX-B: 1\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    assert ports.key_of(8080, received) == "a"


def test_requests_that_differ_in_the_version_alone_show_nothing() -> None:
    one, other = (sent("/", ("User-Agent", f"kube-probe/1.{minor}")) for minor in (1, 2))
    assert shared((8080, one, "a"), (8080, other, "b")).key_of(8080, one) is None


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        sent("/a")[:-1],
        sent("/a") + b"x",
        sent("/a") + sent("/a"),
        sent("/a").replace(b"GET", b"POST"),
        sent("/a").replace(b"Accept", b"accept"),
        sent("/a", ("X-More", "1")),
        sent("/c"),
    ],
)
def test_other_bytes_show_nothing(received: bytes) -> None:
    assert shared((8080, sent("/a"), "a"), (8080, sent("/b"), "b")).key_of(8080, received) is None


@pytest.mark.parametrize(
    ("address", "origin"), [(ONE, "http://198.18.1.1"), (SIX, "http://[fd00:18::1]")]
)
def test_redirects_are_followed_from_the_first_request(address: str, origin: str) -> None:
    one, other = sent("/a", address=address), sent("/b", address=address)
    ports = shared((8080, one, "a"), (8080, other, "b"), address=address)
    assert ports.key_of(8080, behind(other, "/login", f"{origin}:8080/b")) == "b"
    assert ports.key_of(9000, behind(other, "/login/", f"{origin}:8080/login")) == "b"
    assert ports.key_of(8080, behind(other, "/end", f"{origin}:9000/login/")) == "b"
    assert ports.key_of(8080, behind(one, "/x", f"{origin}:8080/c")) is None
    for more in (b"body", other):
        assert ports.key_of(8080, behind(other, "/login", f"{origin}:8080/b") + more) is None


def test_pod_that_redirects_to_anothers_url_does_not_get_there() -> None:
    clock = Clock()
    ports = shared((8080, sent("/a"), "a"), (8080, sent("/b"), "b"), clock=clock)
    origin = "http://198.18.1.1:8080"
    assert ports.key_of(8080, behind(sent("/b"), "/a", f"{origin}/b")) == "b"
    # Now /a may be either of them.
    assert ports.key_of(8080, behind(sent("/b"), "/admin", f"{origin}/a")) is None
    assert ports.key_of(8080, sent("/a")) == "a"
    clock.now += 10
    assert ports.key_of(8080, behind(sent("/a"), "/ready", f"{origin}/a")) == "a"


def test_referer_of_a_spec_shows_nothing() -> None:
    forged = sent("/b", ("Referer", "http://198.18.1.1:8080/a"))
    ports = shared((8080, sent("/a"), "a"), (8080, forged, "b"))
    assert ports.key_of(8080, forged) == "b"
    assert ports.key_of(8080, forged.replace(b"/b", b"/admin", 1)) is None
    assert ports.key_of(8080, behind(sent("/a"), "/x", "http://198.18.1.1:8080/a")) is None


def test_chains_of_redirects_are_bounded() -> None:
    clock = Clock()
    ports = shared((8080, sent("/a"), "a"), (8080, sent("/b"), "b"), clock=clock)

    def follow(path: str, referer: str) -> str | None:
        return ports.key_of(8080, behind(sent("/b"), path, f"http://198.18.1.1:8080{referer}"))

    for number in range(300):
        assert follow(f"/{number}", "/b") == "b"
    assert len(ports._chained) == 256
    assert follow("/end", "/255") == "b"
    assert follow("/end", "/256") is None
    # One that is there lasts for longer.
    clock.now += 4
    assert follow("/0", "/b") == "b"
    clock.now += 4
    assert follow("/new", "/b") == "b"
    assert follow("/end", "/new") == "b"
    assert follow("/end", "/0") == "b"
    assert follow("/end", "/1") is None
    assert len(ports._chained) == 3


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"G", False),
        (b"GET / HTTP/1.1\r\n", False),
        (sent("/"), True),
        (b"\x16\x03\x01", True),
        (b"POST ", True),
        (b"GET " + b"x" * HEAD_MAX_BYTES, True),
    ],
)
def test_reading_ends_with_the_head_or_with_what_is_none(received: bytes, expected: bool) -> None:
    assert is_complete(received) is expected

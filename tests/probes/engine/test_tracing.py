"""Steps are reported as they happen, and a pod's data cannot harm a terminal."""

from __future__ import annotations

import re

import pytest

from probes.engine import prober, tracing
from probes.protocols.exchanges import ConnectionFailure, Exchange, Phase
from probes.spec.definitions import HttpGet, Probe

ADDRESS = "198.18.0.1"


def traced(handler: HttpGet) -> tuple[Exchange, list[str]]:
    reported: list[str] = []
    plan = tracing.traced(
        prober.plan(Probe(handler), [ADDRESS]), lambda address, text: reported.append(text)
    )
    return plan.candidates[0].target.exchange(), reported


def test_a_redirect_is_a_hang_up_and_another_dial() -> None:
    exchange, reported = traced(HttpGet(80))
    assert exchange.hop.port == 80
    exchange.start()
    exchange.receive(
        b"HTTP/1.1 302 F\r\nLocation: https://198.18.0.1:8443/\r\nContent-Length: 0\r\n\r\n"
    )
    assert exchange.hop.port == 8443
    exchange.start()
    exchange.receive(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert exchange.verdict is not None
    assert [re.sub(r"[0-9]+ bytes: (.{12}).*", r"\1", text) for text in reported] == [
        "dials tcp 198.18.0.1:80",
        "connected",
        "sends GET / HTTP/1",
        "receives HTTP/1.1 302",
        "hangs up and dials tcp 198.18.0.1:8443",
        "connected, and through the TLS handshake; the certificate is not verified",
        "sends GET / HTTP/1",
        "receives HTTP/1.1 200",
    ]


def test_hop_that_is_read_again_is_dialled_once() -> None:
    exchange, reported = traced(HttpGet(80))
    assert exchange.hop is exchange.hop
    exchange.start()
    exchange.receive(b"")
    assert [text for text in reported if "bytes" not in text] == [
        "dials tcp 198.18.0.1:80",
        "connected",
        "receives the end of the stream",
    ]
    assert exchange.verdict is not None


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (ConnectionFailure(Phase.DIAL, "refused"), "stops connecting: refused"),
        (ConnectionFailure(Phase.EXCHANGE, "a\x07"), "stops waiting for the answer: a\\x07"),
        (
            ConnectionFailure(Phase.EXCHANGE, "", timeout=True),
            "stops waiting for the answer: the time is over",
        ),
    ],
)
def test_end_is_named_with_its_phase(broken: ConnectionFailure, text: str) -> None:
    exchange, reported = traced(HttpGet(80))
    exchange.fail(broken)
    assert reported == [text]
    assert exchange.verdict is not None


@pytest.mark.parametrize(("length", "dots"), [(120, ""), (121, "...")])
def test_long_data_ends_with_dots(length: int, dots: str) -> None:
    assert tracing.shown(b"x" * length) == f"{length} bytes: {'x' * 120}{dots}"


def test_failure_names_what_was_being_done() -> None:
    exchange, reported = traced(HttpGet(80))
    exchange.fail(ConnectionFailure(Phase.TLS, "EOF"))
    assert reported == ["stops shaking hands over TLS: EOF"]


def test_control_characters_are_spelt_out() -> None:
    shown = tracing.shown(b"\x1b]0;title\x07 \x9b2J\r\n" + b"x" * 500)
    assert shown.startswith("516 bytes: \\x1b]0;title\\x07 \\x9b2J\\r\\nxxx")
    assert shown.endswith("...")
    assert tracing.printable("\u202eevil") == "\\u202eevil"

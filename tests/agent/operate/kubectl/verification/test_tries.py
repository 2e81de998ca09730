"""Tries over real sockets of this machine, and what shows that a packet arrived."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from agent.operate.kubectl.verification import canary, tries


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "_SECONDS", 0.05)


@contextlib.contextmanager
def bound(kind: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, kind) as made:
        made.bind(("127.0.0.1", 0))
        yield made


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_closed_port_shows_that_the_packet_arrived(kind: int) -> None:
    with bound(kind) as listening:
        port = listening.getsockname()[1]
    protocol = "TCP" if kind == socket.SOCK_STREAM else "UDP"
    assert tries.attempt("127.0.0.1", protocol, port) == (
        "open",
        "the port is closed, but the pod responds",
    )


@pytest.mark.parametrize(
    ("packet", "checksum"),
    [
        ("0001f203f4f5f6f7", 0x220D),  # RFC 1071, section 3
        ("ffff0002", 0xFFFD),  # a carry into the lowest bit
        ("0800000000000001", 0xF7FE),
    ],
)
def test_checksum_of_an_echo(packet: str, checksum: int) -> None:
    assert tries._checksum(bytes.fromhex(packet)) == checksum


def test_connection_is_open() -> None:
    with bound(socket.SOCK_STREAM) as listening:
        listening.listen()
        port = listening.getsockname()[1]
        assert tries.attempt("127.0.0.1", "TCP", port) == ("open", "connected")


def test_silence_is_closed_over_tcp_and_unclear_over_udp(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(socket.SOCK_DGRAM) as silent:
        port = silent.getsockname()[1]
        assert tries.attempt("127.0.0.1", "UDP", port) == ("unclear", "no answer")

    def fail(*_: object) -> str:
        raise TimeoutError

    monkeypatch.setattr(tries, "_tcp", fail)
    assert tries.attempt("127.0.0.1", "TCP", 1) == ("closed", "no answer")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (PermissionError(1, "Operation not permitted"), ("closed", "EPERM")),
        (OSError(105, "No buffer space available"), ("closed", "dropped at the interface")),
        (OSError(113, "No route to host"), ("closed", "No route to host")),
        (OSError(24, "Too many open files"), ("unclear", "[Errno 24] Too many open files")),
        (ConnectionResetError(), ("open", "the pod reset it")),
    ],
)
def test_error_shows_whether_the_packet_left(
    monkeypatch: pytest.MonkeyPatch, error: OSError, found: tuple[str, str]
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(tries, "_tcp", fail)
    assert tries.attempt("127.0.0.1", "TCP", 1) == found


def test_right_that_is_missing_is_not_a_closed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", fail)
    assert tries.attempt("127.0.0.1", "ICMP", 0) == ("unclear", "no CAP_NET_RAW")


def test_checksum_is_that_of_rfc_1071() -> None:
    packet = struct.pack("!BBHHH", 8, 0, 0, 0x1234, 1)
    whole = struct.pack("!BBHHH", 8, 0, tries._checksum(packet), 0x1234, 1)
    assert tries._checksum(whole) == 0


def test_each_try_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with bound(socket.SOCK_STREAM) as listening:
        port = listening.getsockname()[1]
    assert tries.main([json.dumps([["127.0.0.1", "TCP", port]] * 2)]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = {"address": "127.0.0.1", "protocol": "TCP", "port": port}
    assert [json.loads(line) for line in lines] == [
        {**wanted, "outcome": "open", "detail": "the port is closed, but the pod responds"}
    ] * 2


def test_canary_answers_at_both_ports_over_both_protocols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tries, "_SECONDS", 5.0)
    ports = []
    for name in ("DECLARED", "UNDECLARED"):
        with bound(socket.SOCK_STREAM) as free:
            ports.append(free.getsockname()[1])
        monkeypatch.setattr(canary, name, ports[-1])
    serving = threading.Thread(target=canary.serve, args=(2.0,))
    serving.start()
    found = set()
    # It listens some moments after its start.
    while (first := tries.attempt("127.0.0.1", "TCP", ports[1])) != ("open", "connected"):
        assert serving.is_alive(), first
    for address in ("127.0.0.1", "::1"):
        for port in ports:
            found |= {tries.attempt(address, protocol, port) for protocol in ("TCP", "UDP")}
    serving.join()
    assert found == {("open", "connected"), ("open", "answered")}

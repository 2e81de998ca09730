"""Lookups of listeners, in the bytes of `struct listener_queries`."""

import ctypes
import ipaddress
import os
import pathlib
import socket
import struct
from collections.abc import Iterator

import pytest

from bpf import errors, listener_lookup, syscalls
from bpf.listener_lookup import CSocketLayout, ListenerLookup

NO_LISTENER, HAS_ROOM, QUEUE_FULL = 1, 2, 3
LAYOUT = CSocketLayout(*range(1, 9))
# An Ethernet header, 2 bytes for the program, the layout; each query has its state at its byte 15.
HEADER = bytes(16) + struct.pack("=8I", *range(1, 9))
QUERY = struct.Struct("=QI2sBB16s")


def query(port: int) -> bytes:
    return listener_lookup.query(1 << 40, 7, "198.18.0.1", port)


class Program:
    """Even ports have a listener with room, odd ones none; port 1 has a full queue."""

    def __init__(self) -> None:
        self.fd = os.open("/dev/null", os.O_RDONLY)
        self.counts: list[int] = []
        self.is_interrupted = False

    def open(self, path: str) -> int:
        assert path == "/progs/look_up_listeners"
        return self.fd

    def run(self, program_fd: int, frame: ctypes.Structure, size: int, repeat: int) -> None:
        content = ctypes.string_at(ctypes.addressof(frame), size)
        assert (program_fd, content[: len(HEADER)]) == (self.fd, HEADER)
        assert size == len(HEADER) + QUERY.size * repeat
        self.counts.append(repeat)
        if self.is_interrupted:
            raise errors.BpfError(4, "interrupted")
        for at in range(len(HEADER), size, QUERY.size):
            port = int.from_bytes(QUERY.unpack_from(content, at)[2], "big")
            state = QUEUE_FULL if port == 1 else NO_LISTENER if port % 2 else HAS_ROOM
            ctypes.memset(ctypes.addressof(frame) + at + 15, state, 1)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program()
    monkeypatch.setattr(listener_lookup, "_layout", lambda: LAYOUT)
    monkeypatch.setattr(syscalls, "open_pin", made.open)
    monkeypatch.setattr(syscalls, "run_program_in_place", made.run)
    return made


@pytest.fixture
def lookup(program: Program) -> Iterator[ListenerLookup]:
    made = ListenerLookup(pathlib.Path("/progs"))
    yield made
    made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(program.fd)


@pytest.mark.parametrize(
    ("address", "family"), [("198.18.0.1", socket.AF_INET), ("fd00:18::1", socket.AF_INET6)]
)
def test_query_names_the_namespace_and_the_address(address: str, family: int) -> None:
    packed = ipaddress.ip_address(address).packed
    expected = QUERY.pack(1 << 40, 7, b"\x1f\x90", family, 0, packed)
    assert listener_lookup.query(1 << 40, 7, address, 8080) == expected


def test_state_of_each_listener_is_found(lookup: ListenerLookup, program: Program) -> None:
    assert lookup.states([]) == b""
    assert [*lookup.states([query(port) for port in (1, 2, 3)])] == [
        *(QUEUE_FULL, HAS_ROOM, NO_LISTENER)
    ]
    assert lookup.look_up([query(port) for port in (1, 2, 3, 4)]) == b"\0\1\0\1"


@pytest.mark.parametrize(
    ("number", "counts"), [(96, [96]), (97, [96, 1]), (200, [96, 96, 8]), (1, [1])]
)
def test_many_listeners_are_looked_up_in_some_calls(
    lookup: ListenerLookup, program: Program, number: int, counts: list[int]
) -> None:
    ports = range(2, number + 2)
    expected = bytes(int(port % 2 == 0) for port in ports)
    assert lookup.look_up([query(port) for port in ports]) == expected
    assert program.counts == counts


def test_lookup_that_was_interrupted_finds_no_room(
    lookup: ListenerLookup, program: Program
) -> None:
    lookup.look_up([query(2), query(4)])
    program.is_interrupted = True
    assert lookup.look_up([query(2), query(4)]) == b"\0\0"

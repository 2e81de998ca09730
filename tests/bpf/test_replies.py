"""Reply tables that user space fills and reads, in the bytes of src/replies.h."""

import ipaddress
import os
import struct
from collections.abc import Iterator

import pytest

from bpf import loader, map_specs, replies, syscalls
from bpf.replies import ReplyFlow, ReplyKey, ReplyTable, ReplyTables
from tests.bpf.pinned import Map, loaded

UDP = 17
POD, PEER = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("198.18.0.2")
POD_V6, PEER_V6 = ipaddress.ip_address("fd00:18::1"), ipaddress.ip_address("fd00:18::2")
BROADCAST = ipaddress.ip_address("255.255.255.255")
QUERY = ReplyFlow(UDP, POD, 53, PEER, 40_000)
KEY = ReplyKey(tuple(0x9E3779B9 * number & 0xFFFFFFFF for number in range(1, 13)))
SLOT = struct.Struct("=QQ")
WAYS = 8
NOW = 1000 * 10**9

# What a program in C has found for this key, with the functions of src/replies.h.
FINGERPRINTS = {
    QUERY: (0x3500D1B502D78125, (134, 55), (727, 693)),
    ReplyFlow(UDP, POD, 40_000, PEER, 53): (0x409C91A4E3B79A1B, (240, 30), (695, 676)),
    ReplyFlow(UDP, POD_V6, 5353, PEER_V6, 5353): (0xE91487877E023A73, (105, 128), (514, 647)),
    ReplyFlow(UDP, POD, 68, BROADCAST, 67): (0x4400184FDE665EBD, (456, 27), (614, 591)),
}


class Table:
    """An array of sets in place of the kernel's, opened by the id 7."""

    def __init__(self) -> None:
        self.sets = {index: bytes(SLOT.size * WAYS) for index in range(768)}
        self.opened: list[int] = []

    def open(self, command: syscalls.Command, map_id: int) -> int:
        assert (command, map_id) == (syscalls.Command.MAP_GET_FD_BY_ID, 7)
        self.opened.append(os.open("/dev/null", os.O_RDONLY))
        return self.opened[-1]

    def look_up(self, fd: int, key: bytes, size: int) -> bytes:
        assert (fd, size) == (self.opened[-1], SLOT.size * WAYS)
        return self.sets[struct.unpack("=I", key)[0]]

    def update(self, fd: int, key: bytes, value: bytes) -> None:
        assert fd == self.opened[-1]
        self.sets[struct.unpack("=I", key)[0]] = value

    def slots(self, index: int) -> list[tuple[int, int]]:
        return [found for found in SLOT.iter_unpack(self.sets[index]) if any(found)]

    def put(self, index: int, *fingerprints: int) -> None:
        content = b"".join(SLOT.pack(one, 5) for one in fingerprints)
        self.sets[index] = content.ljust(SLOT.size * WAYS, b"\0")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(syscalls, "fd_by_id", made.open)
    monkeypatch.setattr(syscalls, "map_lookup", made.look_up)
    monkeypatch.setattr(syscalls, "map_update", made.update)
    return made


@pytest.fixture
def opened(table: Table) -> Iterator[ReplyTable]:
    with ReplyTable(7) as found:
        yield found
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(table.opened[0])


def mapped(address: str) -> bytes:
    return bytes(10) + b"\xff\xff" + ipaddress.ip_address(address).packed


@pytest.mark.parametrize(
    ("flow", "pod", "peer"),
    [
        (QUERY, mapped("198.18.0.1"), mapped("198.18.0.2")),
        (ReplyFlow(UDP, POD_V6, 53, PEER_V6, 40_000), POD_V6.packed, PEER_V6.packed),
        # Any address may send the reply.
        (ReplyFlow(UDP, POD, 53, BROADCAST, 40_000), mapped("198.18.0.1"), bytes(16)),
        (
            ReplyFlow(UDP, POD_V6, 53, ipaddress.ip_address("ff02::fb"), 40_000),
            *(POD_V6.packed, bytes(16)),
        ),
    ],
)
def test_flow_is_packed_as_the_gate_does(flow: ReplyFlow, pod: bytes, peer: bytes) -> None:
    """struct flow: the ports in network order, the protocol and 3 bytes."""
    assert bytes(flow.pack()) == pod + peer + struct.pack(">HHB3x", 53, 40_000, UDP)


@pytest.mark.parametrize(
    ("flow", "fingerprint", "sets", "crowd"),
    [(flow, *expected) for flow, expected in FINGERPRINTS.items()],
)
def test_flow_is_found_where_the_gate_puts_it(
    flow: ReplyFlow, fingerprint: int, sets: tuple[int, int], crowd: tuple[int, int]
) -> None:
    assert KEY.fingerprint(flow.pack()) == fingerprint
    assert replies.question_sets(fingerprint) == sets
    assert replies.crowd_sets(fingerprint) == crowd


def test_flow_is_recorded_as_sent_and_not_answered(table: Table, opened: ReplyTable) -> None:
    fingerprint, (first, second), _ = FINGERPRINTS[QUERY]
    assert opened.sent_ns(fingerprint) is None
    assert opened.fill([QUERY], KEY, 0xFFF)
    assert table.slots(first) == [(fingerprint, 0xFFE)]
    assert opened.sent_ns(fingerprint) == 0xFFE
    # The gate's own entry is newer.
    assert opened.fill([QUERY], KEY, 0x1FFF)
    assert table.slots(first) == [(fingerprint, 0xFFE)]
    assert table.slots(second) == []


def test_flows_of_a_port_fill_its_two_sets_in_turn(table: Table, opened: ReplyTable) -> None:
    fingerprint, (first, second), _ = FINGERPRINTS[QUERY]
    table.put(first, 1, 2)
    table.put(second, 3)
    assert opened.fill([QUERY], KEY, 10)
    assert table.slots(first) == [(1, 5), (2, 5)]
    assert table.slots(second) == [(3, 5), (fingerprint, 10)]


@pytest.mark.parametrize(("count", "is_crowd"), [(3, False), (4, True)])
def test_port_with_many_flows_has_those_that_follow_in_the_crowd(
    table: Table, opened: ReplyTable, count: int, *, is_crowd: bool
) -> None:
    fingerprint, (first, second), (crowd, _) = FINGERPRINTS[QUERY]
    port = fingerprint >> 48
    of_port = [port << 48 | number for number in range(1, count + 1)]
    others = [(port + 1) << 48 | 1, (port - 1) << 48 | 1]
    table.put(first, *of_port[:2], *others)
    table.put(second, *of_port[2:], *others)
    assert opened.fill([QUERY], KEY, 10)
    assert (table.slots(crowd) == [(fingerprint, 10)]) is is_crowd
    assert opened.sent_ns(fingerprint) == 10


def test_flow_without_a_free_slot_is_reported_and_the_others_are_recorded(
    table: Table, opened: ReplyTable
) -> None:
    fingerprint, (first, second), _ = FINGERPRINTS[QUERY]
    other = ReplyFlow(UDP, POD_V6, 5353, PEER_V6, 5353)
    for index in (first, second):
        table.put(index, *range(1, WAYS + 1))
    assert not opened.fill([QUERY, other], KEY, 10)
    assert opened.sent_ns(fingerprint) is None
    assert opened.sent_ns(FINGERPRINTS[other][0]) == 10


def of_node(tables: dict[bytes, bytes], key: bytes | None) -> tuple[loader.Loaded, Map]:
    pinned = Map({} if key is None else {bytes(4): key})
    return loaded({map_specs.REPLIES: Map(tables), map_specs.REPLY_KEY: pinned}), pinned


def test_key_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = struct.pack("=12I", *range(1, 13))
    monkeypatch.setattr(os, "urandom", lambda size: chosen[:size])
    for missing in (None, bytes(48)):
        node, pinned = of_node({}, missing)
        assert ReplyKey.ensure(node) == ReplyKey(tuple(range(1, 13)))
        assert pinned.entries == {bytes(4): chosen}
    pinned.entries[bytes(4)] = struct.pack("=12I", *range(2, 14))
    assert ReplyKey.ensure(node) == ReplyKey(tuple(range(2, 14)))


@pytest.mark.parametrize(
    ("flow", "age_ns", "is_admitted"),
    [
        (QUERY, 120 * 10**9 - 1, True),
        (QUERY, 120 * 10**9, False),
        (ReplyFlow(UDP, POD, 68, BROADCAST, 67), 10 * 10**9 - 1, True),
        (ReplyFlow(UDP, POD, 68, BROADCAST, 67), 10 * 10**9, False),
        (ReplyFlow(UDP, POD, 40_000, PEER, 53), 0, False),
    ],
)
def test_reply_is_admitted_for_a_while(
    table: Table, flow: ReplyFlow, age_ns: int, *, is_admitted: bool
) -> None:
    """Replies from a group for a shorter one."""
    key = struct.pack("=12I", *KEY.words)
    node, _ = of_node({struct.pack("=I", 3): struct.pack("=I", 7)}, key)
    tables = ReplyTables(node)
    recorded = QUERY if flow.peer == PEER else flow
    fingerprint, (index, _), _ = FINGERPRINTS[recorded]
    table.sets[index] = SLOT.pack(fingerprint, NOW - age_ns).ljust(SLOT.size * WAYS, b"\0")
    assert tables.contains(3, flow, NOW) is is_admitted
    assert not tables.contains(4, flow, NOW)

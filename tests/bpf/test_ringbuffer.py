"""Records of a BPF ring buffer, and drop events in one, in the kernel's bytes."""

import ipaddress
import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from bpf import abi, map_specs
from bpf.drop_events import DropEvent, DropEventReader
from bpf.ringbuffer import RingBuffer
from bpf.verdicts import Reason, Verdict
from tests.bpf.pinned import Map, loaded

PAGE = mmap.PAGESIZE
BUSY, DISCARDED = 1 << 31, 1 << 30  # linux/bpf.h: BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT


class Ring:
    """The pages of kernel/bpf/ringbuf.c: the reader's position, the kernel's, the data twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("ring", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 2 * PAGE + 2 * size)
        self.position = 0

    def put(self, record: bytes, flags: int = 0) -> None:
        """struct bpf_ringbuf_hdr (length with flags, offset of the page), record, padding."""
        content = struct.pack("=II", len(record) | flags, 0) + record
        content += bytes(-len(content) % 8)
        for number, byte in enumerate(content):
            at = 2 * PAGE + (self.position + number) % self.size
            for place in (at, at + self.size):
                os.pwrite(self.fd, bytes([byte]), place)
        self.position += len(content)
        os.pwrite(self.fd, struct.pack("=Q", self.position), PAGE)

    def commit(self, at: int, record: bytes) -> None:
        os.pwrite(self.fd, struct.pack("=I", len(record)), 2 * PAGE + at)

    @property
    def consumed(self) -> int:
        return int(struct.unpack("=Q", os.pread(self.fd, 8, 0))[0])


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(PAGE)
    yield made
    os.close(made.fd)


def test_records_are_read_once_and_without_those_that_were_discarded(ring: Ring) -> None:
    buffer = RingBuffer(ring.fd, PAGE)
    assert list(buffer.records()) == []
    ring.put(b"first")
    ring.put(b"discarded", DISCARDED)
    ring.put(b"a third one")
    assert list(buffer.records()) == [b"first", b"a third one"]
    assert ring.consumed == ring.position
    assert list(buffer.records()) == []
    buffer.close()


def test_record_that_is_not_complete_is_waited_for(ring: Ring) -> None:
    buffer = RingBuffer(ring.fd, PAGE)
    ring.put(b"whole")
    at = ring.position
    ring.put(b"in writing", BUSY)
    ring.put(b"later")
    assert list(buffer.records()) == [b"whole"]
    assert ring.consumed == at
    ring.commit(at, b"in writing")
    assert list(buffer.records()) == [b"in writing", b"later"]
    buffer.close()


def test_record_at_the_end_goes_on_at_the_beginning(ring: Ring) -> None:
    buffer = RingBuffer(ring.fd, PAGE)
    for number in range(30):
        record = bytes([number]) * 600
        ring.put(record)
        assert list(buffer.records()) == [record]
    buffer.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, ring: Ring) -> DropEventReader:
    """Both budgets have suppressed events on two CPUs."""
    monkeypatch.setattr(abi, "EVENT_RING_BYTES", PAGE)
    budget = b"".join(struct.pack("=QqQ", 1000, -50, count) for count in (1, 20))
    packets = b"".join(struct.pack("=QqQ", 1000, -50, count) for count in (300, 4000))
    maps = {
        map_specs.DROP_EVENTS: Map({}, ring.fd),
        map_specs.EVENT_BUDGET: Map({bytes(4): budget}),
        map_specs.PACKET_BUDGET: Map({bytes(4): packets}),
    }
    return DropEventReader(loaded(maps))


def test_drop_event_has_all_that_the_kernel_has_recorded(
    ring: Ring, events: DropEventReader
) -> None:
    """struct drop_event; of a drop before any address was chosen these are zero."""
    event = struct.Struct("=QQ16s16sIIHHBBBx16s")
    source, destination = "::ffff:198.18.0.1", "fd00:18::2"
    packed = [ipaddress.ip_address(address).packed for address in (source, destination)]
    ring.put(event.pack(77, 5, *packed, 8, 1234, 40_000, 80, 6, 1, 11, b"cu\xffrl"))
    ring.put(event.pack(78, 0, bytes(16), bytes(16), 0, 0, 0, 0, 17, 2, 19, b""))
    assert events.fileno() == ring.fd
    found = events.read()
    assert events.read() == []
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.read()
    v4, v6 = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address(destination)
    assert found == [
        DropEvent(
            *(77, Verdict.DROP, Reason.NODE, 8, 6, v4, 40_000, v6, 80, 5, 1234, "cu\ufffdrl")
        ),
        DropEvent(*(78, Verdict.WOULD_DROP, Reason.STRICT, 0, 17, None, 0, None, 0, 0, 0, "")),
    ]


def test_events_that_both_budgets_suppress_are_lost(events: DropEventReader) -> None:
    assert events.lost() == 4321
    events.close()
